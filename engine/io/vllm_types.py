"""Conversion between the engine interface's types and vLLM's."""

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from engine.errors import EngineDead, RequestRefused
from engine.kv_transfer.params import to_params
from engine.speculation.request_table import GROUP_ARG, NO_DRAFTS_ARG
from engine.types import Completion, SampleRequest, TokenLogprob, TopLogprobs, VersionSpan


def sampling_params(sample: SampleRequest, max_context_tokens: int) -> SamplingParams:
    """vLLM's sampling parameters of a sample.

    Fields are copied one by one, so no other field of a request reaches vLLM. `max_context_tokens`
    may be smaller than vLLM's own limit.
    """
    sampling = sample.sampling
    max_response_tokens = max_context_tokens - len(sample.prompt_token_ids)
    if max_response_tokens < 1:
        raise RequestRefused(f"the prompt leaves no room in {max_context_tokens} tokens of context")
    return SamplingParams(
        n=1,
        max_tokens=min(sampling.max_tokens, max_response_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sample.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=max(sample.entropy_top_k, sample.num_top_logprobs),
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # not shared
        extra_args=_extra_args(sample),
    )


def _extra_args(sample: SampleRequest) -> dict[str, Any] | None:
    """Extra arguments of a sample. `kv_transfer_params` are set only here, never by a request."""
    carried: dict[str, Any] = {}
    if sample.group is not None:
        carried[GROUP_ARG] = sample.group
    if not sample.speculation:
        carried[NO_DRAFTS_ARG] = True
    if sample.export is not None:
        num_tokens, length = sample.export.num_tokens, len(sample.prompt_token_ids)
        assert 0 < num_tokens <= length, f"{num_tokens} of {length} tokens cannot be exported"
    assert sample.load is None or sample.load.pieces, "there is something to load"
    if sample.export is not None or sample.load is not None:
        carried["kv_transfer_params"] = to_params(sample.export, sample.load)
    return carried or None


class PendingSample:
    """A running sample. Unlike a coroutine, it may be dropped without being awaited.

    `on_finished` receives the completion, including the top k tokens if they were recorded.
    """

    def __init__(
        self,
        queue: Any,
        sample: SampleRequest,
        on_finished: Callable[[Completion], None] | None = None,
    ) -> None:
        self._queue = queue
        self._entropy = sample.entropy_top_k > 0
        self._wants_top_logprobs = sample.num_top_logprobs > 0
        self._on_finished = on_finished

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._completion().__await__()

    async def _completion(self) -> Completion:
        try:
            output = await self._queue.get()
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        found = completion(output, entropy=self._entropy, top_logprobs=self._wants_top_logprobs)
        if self._on_finished is not None:
            self._on_finished(self._with_top_logprobs(found, output))
        return found

    def _with_top_logprobs(self, found: Completion, output: RequestOutput) -> Completion:
        if not self._entropy:
            return found
        return replace(found, top_logprobs=parse_top_logprobs(output.outputs[0].logprobs))


def completion(output: RequestOutput, *, entropy: bool, top_logprobs: bool) -> Completion:
    sample = output.outputs[0]
    return Completion(
        token_ids=list(sample.token_ids),
        logprobs=sampled_logprobs(sample.logprobs),
        finish=sample.finish_reason,
        versions=tuple(
            VersionSpan(version=span.version, start=span.start, end=span.end)
            for span in sample.weight_versions or ()
        ),
        num_cached_tokens=output.num_cached_tokens or 0,
        entropy=top_k_entropies(sample.logprobs) if entropy else None,
        top_logprobs=parse_top_logprobs(sample.logprobs) if top_logprobs else None,
    )


def sampled_logprobs(flat: Any) -> list[float]:
    """Logprobs of the sampled tokens.

    vLLM puts the sampled token first at every position. The first position of a prompt has no
    entry.
    """
    if flat is None:
        return []
    spans = zip(flat.start_indices, flat.end_indices, strict=True)
    return [flat.logprobs[start] if end > start else 0.0 for start, end in spans]


def parse_top_logprobs(flat: Any) -> list[TopLogprobs]:
    """Top logprobs per position, without tokens that top-k or top-p excluded (minus infinity)."""
    if flat is None:
        return []
    each = list(zip(flat.token_ids, flat.logprobs, flat.ranks, strict=True))
    return [
        [TokenLogprob(*entry) for entry in each[start:end] if entry[1] > -math.inf]
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]


def top_k_entropies(flat: Any) -> list[float]:
    """Entropy per position of the renormalised top k, which follow the sampled token."""
    if flat is None:
        return []
    spans = zip(flat.start_indices, flat.end_indices, strict=True)
    return [_entropy(flat.logprobs[start + 1 : end]) for start, end in spans]


def _entropy(logprobs: list[float]) -> float:
    """Entropy of the renormalised distribution. Excluded tokens, at minus infinity, are ignored."""
    kept = [logprob for logprob in logprobs if logprob > -math.inf]
    probabilities = [math.exp(logprob) for logprob in kept]
    total = sum(probabilities)
    if not total:
        return 0.0
    mean = (
        sum(probability * logprob for probability, logprob in zip(probabilities, kept, strict=True))
        / total
    )
    return max(math.log(total) - mean, 0.0)


def scoring_params(num_top_logprobs: int) -> SamplingParams:
    """Parameters of a request for prompt logprobs. vLLM requires it to sample one token."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=num_top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
