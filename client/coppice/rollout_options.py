"""Keyword arguments of the client's rollout methods, and their conversion to a request."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from coppice.prompts import PromptLike, groups_of
from coppice.rollout_results import Sample
from coppice.wire.branching import Branching
from coppice.wire.columns.kv_version_spans import ChainKeepKv
from coppice.wire.columns.token_columns import TokenFields
from coppice.wire.kv_reuse import KvReuse
from coppice.wire.prompt_kv import Kv
from coppice.wire.rollouts import (
    ContinueFrom,
    Finish,
    LogprobsMode,
    RolloutRequest,
    UnfinishedSample,
    WeightsConstraint,
)
from coppice.wire.sampling import Sampling, StructuredOutputs

_PLAIN = (
    *("priority", "speculation", "return_support", "adapter", "echo", "return_message"),
    *("stream_tokens", "top_logprobs", "prompt_logprobs", "return_routed_experts"),
    *("logprob_token_ids", "logprobs_mode"),
)
_LISTS = {"logprob_token_ids", "allowed_token_ids", "bad_words", "stop", "stop_token_ids"}


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
    fields = TokenFields(**sample.wire_fields(UnfinishedSample)).model_dump()
    return UnfinishedSample(**fields, group=group)


class RolloutOptions(TypedDict, total=False):
    """Keyword arguments of the client's rollout methods: all options except the prompts.

    Attributes:
        n: samples per prompt.
        seed: makes sampling reproducible; the prompt at index i uses seed + i.
        seeds: per prompt, one seed per sample; instead of `seed`.
        max_tokens: response tokens per sample; by default up to the context limit.
        temperature: sampling temperature; the returned logprobs refer to the sampling distribution.
        top_p: share of the probability mass to sample from.
        top_k: number of most probable tokens to sample from; 0: all.
        min_tokens: number of tokens before which end-of-sequence tokens and stop conditions do not
            end a sample.
        min_p: minimum probability of a token, relative to that of the most probable token.
        presence_penalty: subtracted from the logits of tokens that occur in the response.
        frequency_penalty: subtracted from a token's logit for each of its occurrences.
        repetition_penalty: divides the logits of tokens that occur in the prompt or the response.
        logit_bias: numbers to add to the logits, by token id.
        allowed_token_ids: the only tokens that may be sampled.
        bad_words: words that are not sampled.
        structured_outputs: constraint on the text: a JSON schema, a regular expression, a grammar.
        stop: strings that end a sample. The text is cut before the string.
        stop_token_ids: tokens that end a sample.
        include_stop_str_in_output: if true, the text is cut after the stop string.
        skip_special_tokens: if false, the text has special tokens.
        ignore_eos: if true, end-of-sequence tokens do not end a sample.
        kv: request for handles to the prompts' KV.
        weights: exact or minimum weights version.
        finish: early finish of a group, by a number of completed samples or by a deadline.
        branching: samples as a tree.
        continue_from: per prompt, unfinished samples to resume, see `Group.unfinished`.
        kv_reuse: KV reuse for prompts given as spans.
        keep_kv: reads KV of the rollout's chain that older weights computed. To resume samples of
            an earlier rollout on their KV, set `chain` to the id of the first one.
        priority: lower values are scheduled first.
        speculation: False disables speculative decoding; the distribution is the same.
        return_support: returns with each token the token ids that it was sampled from.
        echo: if true, the result has the token ids of the prompts.
        return_message: if true, responses to messages are also split into content, reasoning and
            tool calls.
        adapter: name of a loaded LoRA adapter, or `name@version`.
        stream_tokens: streams have the tokens of running samples, too.
        top_logprobs: number of most probable tokens to return at each sampled token.
        logprob_token_ids: tokens whose logprobs to return at each sampled token.
        logprobs_mode: distribution of `top_logprobs` and `logprob_token_ids`: the one that was
            sampled ("processed_logprobs") or the model's own ("raw_logprobs"). With the latter,
            samples have `raw_logprobs` besides `logprobs`.
        prompt_logprobs: number of most probable tokens to return at each prompt token; with 0, the
            prompt tokens' own logprobs only.
        return_routed_experts: if true, returns the experts that a mixture-of-experts model selected
            for each token; the server needs `engine.return_routed_experts`.
    """

    n: int
    seed: int | None
    seeds: Sequence[Sequence[int]] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_tokens: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Iterable[int] | None
    bad_words: Iterable[str]
    structured_outputs: StructuredOutputs | None
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    kv: Kv | None
    weights: WeightsConstraint | None
    finish: Finish | None
    branching: Branching | None
    continue_from: Iterable[Iterable[Sample]]
    kv_reuse: KvReuse | None
    keep_kv: ChainKeepKv | None
    priority: int
    speculation: bool
    return_support: bool
    adapter: str | None
    stream_tokens: bool
    top_logprobs: int | None
    logprob_token_ids: Iterable[int] | None
    logprobs_mode: LogprobsMode
    prompt_logprobs: int | None
    echo: bool
    return_message: bool
    return_routed_experts: bool | None
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
    for name in _LISTS & given.keys():
        given[name] = _list_of(given[name])
    started = to_continue_from(given.pop("continue_from", ()))
    groups = groups_of(prompts, **_only(given, {"n", "seed", "seeds"}))
    sampling = Sampling(**_only(given, Sampling.model_fields.keys()))
    rest = _only(given, {"kv", "weights", "finish", "branching", "kv_reuse", "keep_kv", *_PLAIN})
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


def _list_of(values: Any) -> list[Any] | None:
    """List of an option's values; a single string is one value."""
    if values is None:
        return None
    return [values] if isinstance(values, str) else list(values)
