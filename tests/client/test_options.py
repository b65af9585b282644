from typing import Any

import pytest

from coppice.options import RolloutOptions, rollout_request, session_headers
from coppice.wire.rollouts import GroupRequest, RolloutRequest, Sampling


def test_what_is_left_out_is_the_wires_default() -> None:
    assert rollout_request(["hello"]).sampling == Sampling()


def test_every_option_of_the_wire_has_its_argument() -> None:
    wire = Sampling.model_fields | RolloutRequest.model_fields | GroupRequest.model_fields
    others = {"groups", "sampling", "stream", "prompt", "id"}
    assert RolloutOptions.__annotations__.keys() - {"session"} == wire.keys() - others


def test_a_session_is_a_header_and_no_option_of_the_wire() -> None:
    options: RolloutOptions = {"n": 2, "session": "s-1"}
    assert session_headers(options) == {"X-Session-ID": "s-1"}
    assert options == {"n": 2}
    assert session_headers(options) == {}


@pytest.mark.parametrize("session", ["", "a b", "a\r\nb", "\u00e9"])
def test_a_session_that_is_no_header_is_a_value_error(session: str) -> None:
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
def test_an_option_out_of_bounds_is_a_value_error(options: Any) -> None:
    with pytest.raises(ValueError):
        rollout_request(["hello"], **options)


def test_a_misspelt_option_is_a_type_error() -> None:
    options: Any = {"temprature": 0.5, "top_k": 3}
    with pytest.raises(TypeError, match="no such rollout option: temprature"):
        rollout_request(["hello"], **options)


def test_no_prompts_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="groups"):
        rollout_request([])
