from typing import Any

import pytest

from coppice.rollout_options import RolloutOptions, rollout_request, session_headers
from coppice.wire.rollouts import GroupRequest, RolloutRequest
from coppice.wire.sampling import Sampling


def test_omitted_options_have_the_defaults_of_the_wire() -> None:
    assert rollout_request(["hello"]).sampling == Sampling()


def test_every_wire_option_has_an_argument() -> None:
    wire = Sampling.model_fields | RolloutRequest.model_fields | GroupRequest.model_fields
    others = {"groups", "sampling", "stream", "prompt", "id"}
    assert RolloutOptions.__annotations__.keys() - {"session"} == wire.keys() - others


def test_session_is_a_header_and_not_a_wire_option() -> None:
    options: RolloutOptions = {"n": 2, "session": "s-1"}
    assert session_headers(options) == {"X-Session-ID": "s-1"}
    assert options == {"n": 2}
    assert session_headers(options) == {}


@pytest.mark.parametrize("session", ["", "a b", "a\r\nb", "\u00e9"])
def test_session_that_is_not_a_valid_header_is_a_value_error(session: str) -> None:
    with pytest.raises(ValueError):
        session_headers({"session": session})


@pytest.mark.parametrize(
    "options",
    [
        {"n": 0},
        {"n": 1.5},
        {"seed": -1},
        {"max_tokens": 0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"stop_token_ids": [-1]},
        {"ignore_eos": "yes"},
        {"priority": 2**31},
    ],
)
def test_option_out_of_bounds_is_a_value_error(options: Any) -> None:
    with pytest.raises(ValueError):
        rollout_request(["hello"], **options)


def test_misspelt_option_is_a_type_error() -> None:
    options: Any = {"temprature": 0.5, "top_k": 3}
    with pytest.raises(TypeError, match="unknown rollout option: temprature"):
        rollout_request(["hello"], **options)


def test_empty_prompts_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="groups"):
        rollout_request([])
