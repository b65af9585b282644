"""Every sampling field of vLLM on every route: it reaches the engine, or is refused with advice."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from coppice.wire.sampling import Sampling
from service.compat.anthropic.bodies import MessagesBody
from service.compat.openai.chat import ChatBody
from service.compat.openai.completions import CompletionBody
from service.compat.responses.bodies import ResponsesBody
from service.compat.sglang.generate import SglangSampling
from service.compat.unsupported_fields import NEUTRAL, REFUSED, UNKNOWN
from service.compat.vllm.tokens import GenerateSampling
from tests.compat.test_fields import nameless
from tests.compat.third_party import Foreign, foreign

VALUES: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.5,
    "watermarking": True,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 5,
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 5,
    "min_tokens": 2,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "prompt_logprob_token_ids": [5],
    "prompt_logprob_start": 1,
    "logprob_token_ids": [5],
    "flat_logprobs": True,
    "detokenize": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "output_kind": 1,
    "stream_interval": 2,
    "skip_clone": True,
    "output_text_buffer_length": 5,
    "structured_outputs": {"regex": "a+"},
    "logit_bias": {"7": 1.0},
    "allowed_token_ids": [1, 2],
    "extra_args": {"a": 1},
    "bad_words": ["a"],
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 5,
    "repetition_detection": {"max_pattern_size": 3},
    "routed_experts_prompt_start": 1,
    "trace_decode_token_ids": [5],
}
"""A value with an effect for each field of vLLM's SamplingParams."""


@dataclass(frozen=True)
class Route:
    """`inside` is the object of the body that has the sampling fields.

    `refused` are fields of the model that only have a value without effect.
    """

    path: str
    body: dict[str, Any]
    model: type[BaseModel]
    inside: str | None = None
    refused: frozenset[str] = frozenset()
    status: int = 400

    @property
    def served(self) -> Set[str]:
        return self.model.model_fields.keys() - self.refused

    def with_field(self, name: str) -> dict[str, Any]:
        value = VALUES[name]
        if self.model is ChatBody and name == "logprobs":
            return {**self.body, "logprobs": True, "top_logprobs": value}
        if self.inside is None:
            return {**self.body, name: value}
        return {**self.body, self.inside: {**self.body[self.inside], name: value}}


MESSAGES = [{"role": "user", "content": "abc"}]
NATIVE = {"groups": [{"prompt": {"text": "abc"}}], "sampling": {"max_tokens": 4}}
BRANCHING = {"mode": "interval", "interval": 2, "max_leaves": 2}
ONE_RESPONSE = frozenset({"n"})
SCORED = {"prompt_logprobs"}
"""Fields with a request of their own to the engine."""
COMPAT = [
    Route("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}, ChatBody),
    Route("/v1/completions", {"prompt": [5, 6], "max_tokens": 4}, CompletionBody),
    Route(
        "/v1/responses",
        {"input": "abc", "max_output_tokens": 4},
        ResponsesBody,
        refused=ONE_RESPONSE,
    ),
    Route(
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 4},
        MessagesBody,
        refused=ONE_RESPONSE,
    ),
    Route(
        "/generate",
        {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}},
        SglangSampling,
        "sampling_params",
        status=422,
    ),
    Route(
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}},
        GenerateSampling,
        "sampling_params",
        status=422,
    ),
]
NATIVES = [
    Route("/v1/rollouts", NATIVE, Sampling, "sampling"),
    Route("/v1/rollouts", {**NATIVE, "branching": BRANCHING}, Sampling, "sampling"),
    Route("/v1/sessions", {"sampling": {"max_tokens": 4}}, Sampling, "sampling"),
]


async def engine_requests(served: Foreign, path: str, body: dict[str, Any]) -> Any:
    served.engine.submitted.clear()
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, (body, answer.text)
    return nameless(served.engine.submitted)


@pytest.mark.parametrize("route", COMPAT, ids=lambda route: route.path)
async def test_field_of_other_servers_has_its_effect_or_is_refused(
    tmp_path: Path, route: Route
) -> None:
    async with foreign(tmp_path) as served:
        plain = await engine_requests(served, route.path, route.body)
        for name in VALUES:
            body = route.with_field(name)
            if name in route.served or name in NEUTRAL:
                changed = await engine_requests(served, route.path, body) != plain
                assert changed == (name in route.served - SCORED), name
                continue
            answer = await served.http.post(route.path, json=body)
            assert answer.status_code == route.status, name
            advice = "send n requests" if name in route.refused else UNKNOWN
            advice = REFUSED[name].suggestion if name in REFUSED else advice
            assert name in answer.text and advice in answer.text, name


@pytest.mark.parametrize("route", NATIVES, ids=["rollouts", "trees", "sessions"])
async def test_field_of_the_native_routes_has_its_effect_or_is_refused(
    tmp_path: Path, route: Route
) -> None:
    async with foreign(tmp_path) as served:
        plain = await engine_requests(served, route.path, route.body)
        for name in VALUES:
            body = route.with_field(name)
            if name in route.served:
                found = await engine_requests(served, route.path, body)
                assert found != plain or route.path == "/v1/sessions", name
                continue
            status, problem = await served.refused(route.path, body)
            assert (status, problem["errors"][0]["location"]) == (422, f"sampling.{name}")


async def test_scoring_has_no_sampling_fields(tmp_path: Path) -> None:
    item = {"prompt": {"text": "a"}, "responses": [[5]]}
    async with foreign(tmp_path) as served:
        assert (await served.http.post("/v1/score", json={"items": [item]})).status_code == 200
        for name in VALUES.keys() - {"logprob_token_ids"}:
            status, problem = await served.refused(
                "/v1/score", {"items": [item], name: VALUES[name]}
            )
            assert (status, problem["errors"][0]["location"]) == (422, name)
