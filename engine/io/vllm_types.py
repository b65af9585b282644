"""Between the protocol's types and vLLM's, field by field."""

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from engine.errors import EngineDead, RequestRefused
from engine.kv_transfer.params import carrying
from engine.protocol import Completion, Place, Ranked, SampleRequest, VersionSpan
from engine.speculation.request_slots import GROUP, NO_DRAFTS


def sampling_params(sample: SampleRequest, max_context_tokens: int) -> SamplingParams:
    """Field by field: nothing that a caller sends reaches the engine unnamed. vLLM's own limit may
    be larger than what is served.
    """
    sampling = sample.sampling
    room = max_context_tokens - len(sample.prompt_token_ids)
    if room < 1:
        raise RequestRefused(f"the prompt leaves no room in {max_context_tokens} tokens of context")
    return SamplingParams(
        n=1,
        max_tokens=min(sampling.max_tokens, room),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sample.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=max(sample.entropy_over, sample.num_likeliest),
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nobody else holds these
        extra_args=_extra_args(sample),
    )


def _extra_args(sample: SampleRequest) -> dict[str, Any] | None:
    """The only place that fills `kv_transfer_params`: no caller of the service can."""
    carried: dict[str, Any] = {}
    if sample.group is not None:
        carried[GROUP] = sample.group
    if not sample.speculation:
        carried[NO_DRAFTS] = True
    if sample.export is not None:
        num_tokens, length = sample.export.num_tokens, len(sample.prompt_token_ids)
        assert 0 < num_tokens <= length, f"{num_tokens} of {length} tokens cannot be exported"
    assert sample.load is None or sample.load.pieces, "there is something to load"
    if sample.export is not None or sample.load is not None:
        carried["kv_transfer_params"] = carrying(sample.export, sample.load)
    return carried or None


class Pending:
    """A sample under way. Unlike a coroutine it may be dropped without having been awaited. `ended`
    is told of what comes, with the likeliest tokens wherever they were recorded."""

    def __init__(
        self,
        queue: Any,
        sample: SampleRequest,
        ended: Callable[[Completion], None] | None = None,
    ) -> None:
        self._queue = queue
        self._entropy = sample.entropy_over > 0
        self._likeliest = sample.num_likeliest > 0
        self._ended = ended

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._completion().__await__()

    async def _completion(self) -> Completion:
        try:
            output = await self._queue.get()
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        found = completion(output, entropy=self._entropy, likeliest=self._likeliest)
        if self._ended is not None:
            self._ended(self._with_likeliest(found, output))
        return found

    def _with_likeliest(self, found: Completion, output: RequestOutput) -> Completion:
        if not self._entropy:
            return found
        return replace(found, likeliest=places(output.outputs[0].logprobs))


def completion(output: RequestOutput, *, entropy: bool, likeliest: bool) -> Completion:
    sample = output.outputs[0]
    return Completion(
        token_ids=list(sample.token_ids),
        logprobs=first_logprobs(sample.logprobs),
        finish=sample.finish_reason,
        versions=tuple(
            VersionSpan(version=span.version, start=span.start, end=span.end)
            for span in sample.weight_versions or ()
        ),
        num_cached_tokens=output.num_cached_tokens or 0,
        entropy=entropies(sample.logprobs) if entropy else None,
        likeliest=places(sample.logprobs) if likeliest else None,
    )


def first_logprobs(flat: Any) -> list[float]:
    """vLLM puts the token itself first at every position; a prompt's first position has none."""
    if flat is None:
        return []
    spans = zip(flat.start_indices, flat.end_indices, strict=True)
    return [flat.logprobs[start] if end > start else 0.0 for start, end in spans]


def places(flat: Any) -> list[Place]:
    """Without what top-k or top-p has cut off, which is at minus infinity."""
    if flat is None:
        return []
    each = list(zip(flat.token_ids, flat.logprobs, flat.ranks, strict=True))
    return [
        [Ranked(*entry) for entry in each[start:end] if entry[1] > -math.inf]
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]


def entropies(flat: Any) -> list[float]:
    """Of the likeliest tokens alone, as if there were no others; they follow the token itself."""
    if flat is None:
        return []
    spans = zip(flat.start_indices, flat.end_indices, strict=True)
    return [_entropy(flat.logprobs[start + 1 : end]) for start, end in spans]


def _entropy(logprobs: list[float]) -> float:
    """What top-k or top-p has cut off is at minus infinity and counts for nothing."""
    kept = [logprob for logprob in logprobs if logprob > -math.inf]
    masses = [math.exp(logprob) for logprob in kept]
    total = sum(masses)
    if not total:
        return 0.0
    mean = sum(mass * logprob for mass, logprob in zip(masses, kept, strict=True)) / total
    return max(math.log(total) - mean, 0.0)


def scoring_params(num_likeliest: int) -> SamplingParams:
    """vLLM scores a prompt when it computes it; it wants to sample one token after it."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=num_likeliest,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
