"""Validation of a rollout request across fields: sampling, KV reuse, continued samples."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from coppice.wire.columns.kinds import Values
from coppice.wire.columns.kv_version_spans import KeepKv
from coppice.wire.columns.token_columns import (
    COLUMNS,
    GivenTokenFields,
    TokenFields,
    TokenLists,
    columns_of,
)
from coppice.wire.rollouts import (
    PromptSpan,
    UnfinishedSample,
    WeightsConstraint,
)
from engine.types.info import EngineInfo, KeptKvReason
from service.errors import InvalidRequest, PromptTooLong
from service.rollouts.fairness import TimeSlice
from service.rollouts.groups.supports import given_support
from service.rollouts.request import NewGroup, NewRollout
from service.rollouts.trees.branching_plan import check as check_branching

KEPT_KV_REASONS: Mapping[KeptKvReason, str] = {
    "prefix_caching_off": "needs engine.enable_prefix_caching",
    "kv_offloading": "cannot be combined with engine.kv_offload_bytes",
    "unsupported_cache": "the model has states of many positions, such as those of Mamba layers",
}
WITHOUT_IMAGES = ("kv", "keep_kv", "branching", "continue_from", "prompt_logprobs")
"""Options of a rollout that know a prompt by its tokens alone."""
MAX_SAMPLES = 65_536
"""Limit of the samples of one request, summed over its groups.

What an API key may occupy is limited by limits.max_samples_per_key.
"""


def check(request: NewRollout, *, is_blocking: bool) -> int:
    """Validate a rollout request across its fields; returns its number of samples.

    `is_blocking`: the caller receives nothing before the rollout has ended.
    """
    _check_reuse(request)
    _check_message(request)
    if request.branching is not None:
        for group in request.groups:
            check_branching(request.branching, n=group.n)
            if group.seeds is not None:
                raise InvalidRequest("with branching, send seed instead of seeds")
        if request.branching.mode == "external" and is_blocking:
            raise InvalidRequest("mode external needs Prefer: respond-async or stream: true")
        if request.stream_tokens:
            raise InvalidRequest("stream_tokens cannot be combined with branching")
        if request.finish is not None and request.finish.select != "first":
            raise InvalidRequest("with branching, finish.select must be first")
    if request.adapter is not None and request.kv is not None:
        raise InvalidRequest("prompt KV is that of the base model: leave out kv or adapter")
    _check_keep_kv(request)
    _check_images(request)
    num_finish_samples = (request.finish and request.finish.num_samples) or 1
    num_samples = [num_samples_of(request, group) for group in request.groups]
    if min(num_samples) < num_finish_samples:
        raise InvalidRequest(
            f"finish.num_samples is {num_finish_samples}, but a group has fewer samples"
        )
    if sum(num_samples) > MAX_SAMPLES:
        raise InvalidRequest(
            f"{sum(num_samples)} samples; a request may have at most {MAX_SAMPLES}"
        )
    return sum(num_samples)


def _check_reuse(request: NewRollout) -> None:
    """Reject spans that contradict each other, and options that need exact KV with KV reuse."""
    for group in request.groups:
        if group.spans is not None:
            _check_names(group.spans)
    reuse = request.kv_reuse
    if reuse is None or reuse.mode == "off":
        return
    if any(group.spans is None for group in request.groups):
        raise InvalidRequest("kv_reuse needs prompts given as spans")
    if request.continue_from is not None:
        raise InvalidRequest("continue_from needs exact KV of the prompt: set kv_reuse.mode to off")
    if request.kv is not None:
        raise InvalidRequest(
            f"kv_reuse.mode {reuse.mode} makes the prompt KV approximate, and approximate KV is "
            "not exported: leave out kv or kv_reuse"
        )
    if request.adapter is not None:
        raise InvalidRequest(
            "KV of spans is cached for the base model only: set kv_reuse.mode to off"
        )
    if request.branching is not None:
        raise InvalidRequest("branching needs kv_reuse.mode off")


def _check_names(spans: Sequence[PromptSpan]) -> None:
    seen: dict[str, list[int]] = {}
    for span in spans:
        if span.cache_key is None:
            continue
        if seen.setdefault(span.cache_key, span.token_ids) != span.token_ids:
            raise InvalidRequest(f"spans of cache_key {span.cache_key!r} differ within one prompt")


def _check_keep_kv(request: NewRollout) -> None:
    """Reject options that need KV of one weights version alone."""
    if request.keep_kv is None:
        return
    if request.kv is not None:
        raise InvalidRequest.of_parameter(
            "keep_kv", "a handle has KV of one weights version: leave out kv or keep_kv"
        )
    if request.kv_reuse is not None and request.kv_reuse.mode != "off":
        raise InvalidRequest.of_parameter("keep_kv", "cannot be combined with kv_reuse")


def _check_images(request: NewRollout) -> None:
    """Refuse options that would leave out the images of a prompt."""
    if not any(group.num_images for group in request.groups):
        return
    for name in WITHOUT_IMAGES:
        if getattr(request, name) is not None:
            raise InvalidRequest.of_parameter(name, "not supported for prompts with images")
    if any(
        not isinstance(group.prompt, list) and group.prompt.truncate_prompt_tokens is not None
        for group in request.groups
    ):
        raise InvalidRequest.of_parameter(
            "truncate_prompt_tokens", "not supported for prompts with images"
        )


def check_kept_kv(keep: KeepKv | None, weights: WeightsConstraint | None, info: EngineInfo) -> None:
    """Refuse to keep KV across weights updates if the engine cannot, or for an exact version."""
    if keep is None:
        return
    if info.kept_kv_reason is not None:
        raise InvalidRequest.of_parameter("keep_kv", KEPT_KV_REASONS[info.kept_kv_reason])
    if weights is not None and weights.exact_version is not None:
        raise InvalidRequest.of_parameter(
            "keep_kv", "weights.exact_version needs KV of that version: leave out one of them"
        )


def _check_message(request: NewRollout) -> None:
    """Reject `return_message` where no sample of the answer could have a message."""
    if not request.return_message:
        return
    if all(group.messages is None for group in request.groups):
        raise InvalidRequest.of_parameter("return_message", "needs a prompt of messages")
    if request.branching is not None and not request.branching.flatten:
        raise InvalidRequest.of_parameter("return_message", "with branching, needs flatten: true")


def num_samples_of(request: NewRollout, group: NewGroup) -> int:
    """Maximum number of samples that a requested group may have in the engine at once."""
    return group.n if request.branching is None else request.branching.max_leaves


def samples_to_continue(request: NewRollout) -> Mapping[int, list[UnfinishedSample]]:
    """Unfinished samples that a request resumes, by the index of their group.

    They become the first samples of the group.
    """
    continued = defaultdict[int, list[UnfinishedSample]](list)
    for sample in () if request.continue_from is None else request.continue_from.samples:
        continued[sample.group].append(sample)
    return continued


async def check_continue_from(
    request: NewRollout, prompts: Sequence[Sequence[int]], info: EngineInfo
) -> Mapping[int, list[TokenLists]]:
    """Validate the unfinished samples that the request resumes; returns them by their group.

    Their tokens stay as they were sampled, with the logprobs and version spans of the weights that
    generated them. The tokens after them are sampled with the active weights. If these are the same
    weights, the KV blocks of the earlier tokens may still be cached.
    """
    if request.continue_from is None:
        return {}
    if request.branching is not None:
        raise InvalidRequest("continue_from cannot be combined with branching")
    found, turn = defaultdict[int, list[TokenLists]](list), TimeSlice()
    for index, continued in samples_to_continue(request).items():
        if index >= len(prompts):
            raise InvalidRequest("continue_from names a group that is not in the request")
        if len(continued) > request.groups[index].n:
            raise InvalidRequest("continue_from has more samples of a group than its n")
        for sample in continued:
            check_sample(sample, request, len(prompts[index]), info)
            support = await given_support(
                sample, wanted=request.return_support, vocab_size=info.vocab_size
            )
            found[index].append(columns_of(sample, support=support))
            await turn.pause()
    return found


def check_sample(
    sample: GivenTokenFields | TokenFields,
    request: NewRollout,
    num_prompt_tokens: int,
    info: EngineInfo,
) -> None:
    """Refuse a sample to resume that does not fit the request, except for its supports."""
    num_tokens = len(sample.token_ids)
    if (sample.raw_logprobs is not None) != (request.logprobs_mode == "raw_logprobs"):
        raise InvalidRequest(
            "continue_from needs one of raw_logprobs per token with logprobs_mode raw_logprobs, "
            "and none otherwise"
        )
    for name, kind in COLUMNS.items():
        values = getattr(sample, name, None)
        if isinstance(kind, Values) and values is not None and len(values) != num_tokens:
            raise InvalidRequest(f"continue_from needs one {name.removesuffix('s')} per token")
    _check_versions(sample, request)
    _check_kv_versions(sample, num_prompt_tokens)
    if max(sample.token_ids) >= info.vocab_size:
        raise InvalidRequest(f"token ids must be below {info.vocab_size}")
    if num_tokens >= (request.sampling.max_tokens or info.max_context_tokens):
        raise InvalidRequest("a sample in continue_from already has max_tokens tokens")
    if num_prompt_tokens + num_tokens >= info.max_context_tokens:
        raise PromptTooLong(
            f"{num_prompt_tokens} prompt tokens and {num_tokens} tokens of continue_from; "
            f"the context holds {info.max_context_tokens}"
        )


def _check_versions(sample: GivenTokenFields | TokenFields, request: NewRollout) -> None:
    at = 0
    for span in sample.versions:
        if span.start != at or span.end <= at:
            raise InvalidRequest("the version spans of continue_from must be consecutive")
        at = span.end
    if at != len(sample.token_ids):
        raise InvalidRequest("the version spans of continue_from must cover its tokens")
    exact_version = request.weights and request.weights.exact_version
    if exact_version is not None and any(span.version != exact_version for span in sample.versions):
        raise InvalidRequest(f"continue_from has tokens of other versions than {exact_version!r}")


def _check_kv_versions(sample: GivenTokenFields | TokenFields, num_prompt_tokens: int) -> None:
    """Validate the spans of a sample's KV; those of one `first_token` begin at position 0."""
    first, at = -1, 0
    for span in sample.kv_versions:
        begins = span.first_token > first
        at, first = (0, span.first_token) if begins else (at, first)
        if span.first_token < first or span.start != at or span.end <= at:
            raise InvalidRequest("the KV version spans of continue_from must be consecutive")
        at = span.end
    num_tokens = len(sample.token_ids)
    if sample.kv_versions and (first >= num_tokens or at != num_prompt_tokens + num_tokens - 1):
        raise InvalidRequest("the KV version spans of continue_from must cover its tokens")
