"""Loads of the host path's benchmark: requests of a run, by route, and the tokens of its answers.

Imports neither torch nor vLLM, as a trainer's HTTP client would not.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coppice.wire.packed.requests import PACKED_MEDIA_TYPE

JSON, NDJSON = "application/json", "application/x-ndjson"
SMALLEST_ID, LARGEST_ID = 10, 250
SUPPORT_TOP_P = 0.9
NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Groups of samples that run at once, several times in sequence (`num_waves`).

    `logprobs` is the number of top logprobs beside the sampled token's; None returns none at all.
    """

    num_groups: int
    group_size: int = 1
    logprobs: int | None = 0
    has_support: bool = False
    prompt_tokens: int = 32
    max_tokens: int = 128
    num_waves: int = 1

    @property
    def num_samples(self) -> int:
        return self.num_groups * self.group_size

    @property
    def num_tokens(self) -> int:
        return self.num_samples * self.max_tokens * self.num_waves

    @property
    def name(self) -> str:
        values = {None: "no logprobs", 0: "logprobs"}.get(self.logprobs, f"top-{self.logprobs}")
        values += " and supports" if self.has_support else ""
        return f"{self.num_groups} x {self.group_size}, {values}"

    def prompts(self) -> list[list[int]]:
        """Prompts of one wave, which no earlier one has had."""
        draw = random.Random(next(NUMBERS))
        return [
            draw.choices(range(SMALLEST_ID, LARGEST_ID), k=self.prompt_tokens)
            for _ in range(self.num_groups)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A way to request the samples of a group. `marker` begins a delivery of tokens in a stream."""

    path: str
    accept: str = JSON
    body: Callable[[Load, str, list[int]], dict[str, Any]]
    count: Callable[[bytes], int]
    marker: str = ""


def _rollout(load: Load, model: str, prompt: list[int]) -> dict[str, Any]:
    group = {"prompt": {"token_ids": prompt}, "n": load.group_size}
    top = {"top_logprobs": load.logprobs} if load.logprobs else {}
    assert load.logprobs is not None, "rollouts always have logprobs"
    support = {"return_support": True} if load.has_support else {}
    return {"groups": [group], "sampling": _sampling(load), **top, **support}


def _streamed_rollout(load: Load, model: str, prompt: list[int]) -> dict[str, Any]:
    return _rollout(load, model, prompt) | {"stream": True, "stream_tokens": True}


def _completion(load: Load, model: str, prompt: list[int]) -> dict[str, Any]:
    values = {} if load.logprobs is None else {"logprobs": load.logprobs}
    return {
        "model": model,
        "prompt": prompt,
        "n": load.group_size,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **values,
        **_sampling(load),
    }


def _streamed_completion(load: Load, model: str, prompt: list[int]) -> dict[str, Any]:
    return _completion(load, model, prompt) | {"stream": True}


def _generate(load: Load, model: str, prompt: list[int]) -> dict[str, Any]:
    params = {"n": load.group_size, "logprobs": load.logprobs, "detokenize": False}
    return {"model": model, "token_ids": prompt, "sampling_params": params | _sampling(load)}


def _sampling(load: Load) -> dict[str, Any]:
    top_p = {"top_p": SUPPORT_TOP_P} if load.has_support else {}
    return {"max_tokens": load.max_tokens, "ignore_eos": True, "temperature": 1.0, **top_p}


def _of_usage(name: str) -> Callable[[bytes], int]:
    return lambda answer: int(json.loads(answer)["usage"][name])


def _of_packed(answer: bytes) -> int:
    length = int.from_bytes(answer[:8], "little")
    header = json.loads(answer[8 : 8 + length])
    return int(header["token_ids"]["shape"][0])


def _of_records(answer: bytes) -> int:
    records = map(json.loads, answer.splitlines())
    return sum(len(each["token_ids"]) for each in records if each["type"] == "tokens")


def _of_events(answer: bytes) -> int:
    return sum(
        len(choice["token_ids"] or ()) for event in _events(answer) for choice in event["choices"]
    )


def _events(answer: bytes) -> Iterator[Mapping[str, Any]]:
    for line in answer.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


ROUTES: Final[Mapping[str, Route]] = {
    "packed": Route(path="/v1/rollouts", accept=PACKED_MEDIA_TYPE, body=_rollout, count=_of_packed),
    "json": Route(path="/v1/rollouts", body=_rollout, count=_of_usage("num_generated_tokens")),
    "stream": Route(
        path="/v1/rollouts",
        accept=NDJSON,
        body=_streamed_rollout,
        count=_of_records,
        marker='"type":"tokens"',
    ),
    "completions": Route(
        path="/v1/completions", body=_completion, count=_of_usage("completion_tokens")
    ),
    "completions stream": Route(
        path="/v1/completions",
        body=_streamed_completion,
        count=_of_events,
        marker='"token_ids"',
    ),
    "generate": Route(
        path="/inference/v1/generate", body=_generate, count=_of_usage("completion_tokens")
    ),
}


def requests_of(route: Route, load: Load, model: str) -> Sequence[bytes]:
    """HTTP requests of one wave."""
    return [_request(route, route.body(load, model, prompt)) for prompt in load.prompts()]


def _request(route: Route, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {route.path} HTTP/1.1\r\nHost: localhost\r\nAccept: {route.accept}\r\n"
        f"Content-Type: {JSON}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
