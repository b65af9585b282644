"""Keyword arguments of the client's rollout methods; defaults are those of the wire format."""

from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

from coppice.prompts import PromptLike, groups_of
from coppice.results import Sample
from coppice.wire.branching import Branching
from coppice.wire.kv import Kv
from coppice.wire.kv_reuse import KvReuse
from coppice.wire.rollouts import (
    ContinueFrom,
    Finish,
    GivenSpan,
    RolloutRequest,
    Sampling,
    UnfinishedSample,
    WeightsConstraint,
)

_PLAIN = ("priority", "speculation", "adapter")


def to_continue_from(samples: Iterable[Iterable[Sample]]) -> ContinueFrom | None:
    """Builds the `continue_from` field of a rollout request, from one list of samples per prompt.

    Samples without tokens are left out: there is nothing to resume.
    """
    given = [
        _unfinished(sample, group)
        for group, of_group in enumerate(samples)
        for sample in of_group
        if len(sample.token_ids)
    ]
    return ContinueFrom(samples=given) if given else None


def _unfinished(sample: Sample, group: int) -> UnfinishedSample:
    return UnfinishedSample(
        group=group,
        token_ids=sample.token_ids.tolist(),
        logprobs=sample.logprobs.tolist(),
        versions=[
            GivenSpan(version=span.version, start=span.start, end=span.end, adapter=span.adapter)
            for span in sample.versions
        ],
    )


class RolloutOptions(TypedDict, total=False):
    """Keyword arguments of the client's rollout methods: all options except the prompts.

    Attributes:
        n: samples per prompt.
        seed: makes sampling reproducible; the prompt at index i uses seed + i.
        max_tokens: response tokens per sample; by default up to the context limit.
        temperature: sampling temperature; the returned logprobs refer to the sampling distribution.
        top_p: share of the probability mass to sample from.
        top_k: number of most probable tokens to sample from; 0: all.
        stop_token_ids: tokens that end a sample.
        ignore_eos: if true, end-of-sequence tokens do not end a sample.
        kv: request for handles to the prompts' KV.
        weights: exact or minimum weights version.
        finish: early finish of a group, by a number of completed samples or by a deadline.
        branching: samples as a tree.
        continue_from: per prompt, unfinished samples to resume, see `Group.unfinished`.
        kv_reuse: KV reuse for prompts given as spans.
        priority: lower values are scheduled first.
        speculation: False disables speculative decoding; the distribution is the same.
        adapter: name of a loaded LoRA adapter, or `name@version`.
    """

    n: int
    seed: int | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    kv: Kv | None
    weights: WeightsConstraint | None
    finish: Finish | None
    branching: Branching | None
    continue_from: Iterable[Iterable[Sample]]
    kv_reuse: KvReuse | None
    priority: int
    speculation: bool
    adapter: str | None
    session: str
    """Session name for load balancers, which route a session to the replica that has cached its
    earlier turns."""


def rollout_request(
    prompts: Iterable[PromptLike], **options: Unpack[RolloutOptions]
) -> RolloutRequest:
    """Builds the body of a streaming POST /v1/rollouts. Raises TypeError or ValueError."""
    given: dict[str, Any] = dict(options)
    if unknown := sorted(given.keys() - RolloutOptions.__annotations__.keys()):
        raise TypeError(f"unknown rollout option: {', '.join(unknown)}")
    if "stop_token_ids" in given:
        given["stop_token_ids"] = list(given["stop_token_ids"])
    started = to_continue_from(given.pop("continue_from", ()))
    groups = groups_of(prompts, **_only(given, {"n", "seed"}))
    sampling = Sampling(**_only(given, Sampling.model_fields.keys()))
    rest = _only(given, {"kv", "weights", "finish", "branching", "kv_reuse", *_PLAIN})
    return RolloutRequest(
        groups=groups, sampling=sampling, continue_from=started, stream=True, **rest
    )


def session_headers(options: RolloutOptions) -> dict[str, str]:
    """Moves `session` from the options to an HTTP header, by which load balancers route."""
    session = options.pop("session", None)
    if session is None:
        return {}
    if not session or not all("!" <= character <= "~" for character in session):
        raise ValueError("session must be printable ASCII without spaces")
    return {"X-Session-ID": session}


def _only(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}
