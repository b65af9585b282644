"""Submission, scoring and abort of vLLM requests, in the service's process.

Each sample is one request with n=1, as in vLLM's own fan-out of larger n. So each sample can be
aborted, versioned and drafted separately. Siblings share their prompt's KV through prefix caching.
They are submitted in one iteration of the event loop so that they are scheduled together.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestState

from engine.adapters.loaded_adapters import LoadedAdapters
from engine.errors import EngineDead, RequestRefused, SupportLost
from engine.kv_lifetime import version_spans
from engine.launch.processes import VllmProcesses
from engine.launch.ranks.placement import Placement, running_tokens
from engine.requests import logprob_arrays, stop_strings
from engine.requests.logprobs import (
    ScoredTokens,
    given_logprobs,
    prompt_logprobs,
    sampled_logprobs,
    top_k_entropies,
)
from engine.requests.request_params import requested_logprobs, sampling_params
from engine.sampling.step_supports import rows_of
from engine.types.samples import Completion, SampleRequest, TokenDelta, TopLogprobRows, VersionSpan


class PendingSample:
    """Awaitable of a running sample. Unlike a coroutine, it may be dropped without being awaited.

    `on_finished` receives the completion, including the top k tokens if they were recorded.
    """

    def __init__(
        self,
        queue: Any,
        sample: SampleRequest,
        progress: Callable[[], tuple[VersionSpan, ...]],
        on_finished: Callable[[Completion], None] | None = None,
    ) -> None:
        self._queue = queue
        self._progress = progress
        self._sample = sample
        self._num_delivered = 0
        self._ended = False
        self._on_finished = on_finished

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._completion().__await__()

    async def _completion(self) -> Completion:
        try:
            while not (output := await self._queue.get()).finished:
                self._deliver(output)
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        found = to_completion(output, self._sample)
        if self._on_finished is not None:
            self._on_finished(
                replace(found, top_logprobs=_recorded_rows(output.outputs[0].logprobs))
            )
        return found

    def _deliver(self, output: RequestOutput) -> None:
        """Pass the new tokens of a running sample to `on_tokens`."""
        start, (sample,) = self._num_delivered, output.outputs
        end = self._num_delivered = len(sample.token_ids)
        if self._sample.on_tokens is None or end == start or self._ended:
            return
        flat: Any = sample.logprobs
        logprobs = sampled_logprobs(flat[start:end])
        num_possible = _num_possible(logprobs)
        if num_possible < end - start:
            self._ended, end = True, start + num_possible
        if end == start:
            return
        flat = flat[start:end]
        delta = TokenDelta(
            start=start,
            token_ids=list(sample.token_ids[start:end]),
            logprobs=logprobs[:num_possible],
            versions=_spans_between(self._progress(), start, end),
            top_logprobs=_top_logprobs(flat, self._sample),
        )
        self._sample.on_tokens(delta)


def _salt(sample: SampleRequest) -> str | None:
    return sample.cache_salt if sample.kept_kv is None else sample.kept_kv.chain


def _constrains_reasoning(sample: SampleRequest) -> bool:
    """True if a constraint holds from the first token on."""
    outputs = sample.sampling.structured_outputs
    return outputs is not None and outputs.enable_in_reasoning


def _recorded_rows(logprobs: Any) -> TopLogprobRows | None:
    """Top logprobs of a sample, if vLLM returned any for whatever purpose."""
    return logprobs.rows() if isinstance(logprobs, logprob_arrays.LogprobChunks) else None


def _top_logprobs(logprobs: Any, request: SampleRequest) -> TopLogprobRows | None:
    """Top logprobs of the sampled distribution, if requested."""
    rows, k = _recorded_rows(logprobs), 0 if request.raw_logprobs else request.num_top_logprobs
    return rows.columns(k) if k and rows is not None else None


def to_completion(output: RequestOutput, request: SampleRequest) -> Completion:
    sample, k = output.outputs[0], request.entropy_top_k
    rows = _recorded_rows(sample.logprobs)
    versions = tuple(
        VersionSpan(version=span.version, start=span.start, end=span.end)
        for span in sample.weight_versions or ()
    )
    completion = Completion(
        token_ids=list(sample.token_ids),
        logprobs=sampled_logprobs(sample.logprobs),
        finish=sample.finish_reason,
        versions=versions,
        kv_versions=version_spans.kv_version_spans(
            version_spans.reports_of(output), versions, len(request.prompt_token_ids)
        ),
        num_cached_tokens=output.num_cached_tokens or 0,
        stop_reason=sample.stop_reason,
        entropy=top_k_entropies(rows, k) if k and rows is not None else None,
        top_logprobs=_top_logprobs(sample.logprobs, request),
        routed_experts=sample.routed_experts,
    )
    replayed = replace(completion, **_replayed(sample, request))
    return _possible_part(replayed, len(request.prompt_token_ids))


def _num_possible(logprobs: Sequence[float]) -> int:
    """Number of tokens before the first one whose logprob is NaN."""
    if not math.isnan(sum(logprobs)):
        return len(logprobs)
    return next(n for n, logprob in enumerate(logprobs) if math.isnan(logprob))


def _possible_part(found: Completion, num_prompt_tokens: int) -> Completion:
    """The completion up to a position with NaN logits, or where its constraints exclude all tokens.

    vLLM samples an arbitrary token there, with the logprob NaN.
    """
    length = len(found.token_ids)
    given = [values for values in (found.logprobs, found.raw_logprobs) if values]
    end = min(map(_num_possible, given), default=length)
    if end == length:
        return found
    experts = found.routed_experts
    return replace(
        found,
        **found.first(end),
        finish="error",
        stop_reason=None,
        versions=_spans_between(found.versions, 0, end),
        kv_versions=version_spans.cut_kv_versions(found.kv_versions, num_prompt_tokens, end),
        routed_experts=None if experts is None else experts[: len(experts) - (length - end)],
    )


def _spans_between(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(version=span.version, start=max(span.start, start), end=min(span.end, end))
        for span in spans
        if span.start < end and span.end > start
    )


def _replayed(sample: Any, request: SampleRequest) -> dict[str, Any]:
    """Fields of a completion that the hooks of the sampler return: supports and logprobs.

    Raises SupportLost if the engine lacks those of a token.
    """
    further = requested_logprobs(request)
    if not (request.support or further.width):
        return {}
    rows = rows_of(sample.sampling_mask or ())
    if len(rows) != len(sample.token_ids) or not all(map(further.fits, rows)):
        raise SupportLost(f"{len(rows)} supports for {len(sample.token_ids)} tokens")
    found, token_ids = further.split(rows), np.array(sample.token_ids, np.int32)
    given = np.tile(np.array(further.given, np.int32), (len(rows), 1))
    fields: dict[str, Any] = {"support": found.supports if request.support else None}
    if further.given:
        fields["given_logprobs"] = _table(token_ids, given, found.given)
    if found.raw is not None:
        fields["raw_logprobs"] = found.raw.tolist()
    if further.num_raw:
        fields["top_logprobs"] = _table(token_ids, found.raw_top_ids, found.raw_top)
    return fields


def _table(
    sampled: NDArray[np.int32], token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> TopLogprobRows:
    """Logprobs of further tokens; the sampled ones are in column 0 without a logprob."""
    return TopLogprobRows(
        np.column_stack([sampled, token_ids]),
        np.pad(logprobs, ((0, 0), (1, 0)), constant_values=-np.inf),
        np.zeros(len(sampled), np.int64),
    )


def version_spans_so_far(state: RequestState) -> tuple[VersionSpan, ...]:
    """Version spans of a running request's tokens; vLLM itself reports them only at the end."""
    if state.detokenizer is None:
        return ()
    starts = state.weight_version_starts
    ends = [start for _, start in starts[1:]] + [state.detokenizer.num_output_tokens()]
    return tuple(
        VersionSpan(version=version, start=start, end=end)
        for (version, start), end in zip(starts, ends, strict=bool(starts))
    )


class Generation:
    """Generates samples and scores responses with the running vLLM."""

    def __init__(
        self, processes: VllmProcesses, adapters: LoadedAdapters, *, num_engines: int
    ) -> None:
        logprob_arrays.install()
        version_spans.install()
        self._processes = processes
        self._adapters = adapters
        self._num_engines = num_engines
        self._placement = Placement(num_engines, lambda: running_tokens(processes.llm))
        stop_strings.install()

    async def warm_up(self, eos_token_ids: Sequence[int]) -> None:
        """Generate once per engine, as vLLM compiles for seconds in its first generation."""
        token = eos_token_ids[0] if eos_token_ids else 0
        params = SamplingParams(
            max_tokens=4, top_p=0.9, top_k=20, ignore_eos=True, logprobs=0, detokenize=False
        )
        async with asyncio.TaskGroup() as tasks:
            for rank in range(self._num_engines):
                tasks.create_task(self._warm_up_one(rank, token, params))

    async def _warm_up_one(self, rank: int, token: int, params: SamplingParams) -> None:
        prompt = tokens_input([token] * 4)
        async for _ in self._processes.llm.generate(
            prompt, params, f"warm-up-{rank}", data_parallel_rank=rank
        ):
            pass

    async def submit(
        self,
        samples: Sequence[SampleRequest],
        max_context_tokens: int,
        on_finished: Callable[[SampleRequest, Completion], None] | None,
    ) -> list[Awaitable[Completion]]:
        try:
            rank = self._rank(samples)
            return [
                await self._submit_one(
                    replace(sample, data_parallel_rank=rank), max_context_tokens, on_finished
                )
                for sample in samples
            ]
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        except (VLLMClientError, ValueError, RequestRefused) as error:
            await self.abort([sample.id for sample in samples])
            raise RequestRefused(str(error)) from error

    async def _submit_one(
        self,
        sample: SampleRequest,
        max_context_tokens: int,
        on_finished: Callable[[SampleRequest, Completion], None] | None,
    ) -> PendingSample:
        queue = await self._processes.llm.add_request(
            sample.id,
            tokens_input(list(sample.prompt_token_ids), cache_salt=_salt(sample)),
            sampling_params(sample, max_context_tokens),
            lora_request=self._adapters.request(sample.adapter),
            priority=sample.priority,
            session_id=sample.session_id,
            data_parallel_rank=sample.data_parallel_rank,
            reasoning_ended=_constrains_reasoning(sample) or None,
        )
        return PendingSample(
            queue,
            sample,
            partial(self._spans, sample.id),
            partial(on_finished, sample) if on_finished else None,
        )

    def _rank(self, samples: Sequence[SampleRequest]) -> int | None:
        """Data-parallel rank of samples that are submitted together."""
        block_size: int = self._processes.llm.vllm_config.cache_config.block_size
        return self._placement.rank(samples, block_size)

    def progress(self, sample_ids: Sequence[str]) -> list[tuple[VersionSpan, ...]]:
        return [self._spans(sample_id) for sample_id in sample_ids]

    def _spans(self, sample_id: str) -> tuple[VersionSpan, ...]:
        processor = self._processes.llm.output_processor
        [internal_id] = processor.external_req_ids.get(sample_id) or [""]
        state = processor.request_states.get(internal_id)
        return () if state is None else version_spans_so_far(state)

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None
    ) -> list[float]:
        rows = await self.top_logprobs([*prompt, *response], 0, adapter)
        logprobs: list[float] = rows.logprobs[len(prompt) :, 0].tolist()
        return logprobs

    async def top_logprobs(
        self, prompt: Sequence[int], num_top_logprobs: int, adapter: str | None
    ) -> TopLogprobRows:
        lora_request = self._adapters.request(adapter)
        return await prompt_logprobs(
            self._processes.llm, prompt, lora_request, num_top_logprobs, self._placement.rank()
        )

    async def given_logprobs(
        self, prompt: Sequence[int], given: NDArray[np.int32], adapter: str | None
    ) -> TopLogprobRows:
        lora_request, rank = self._adapters.request(adapter), self._placement.rank()
        scored = ScoredTokens(prompt, lora_request, rank)
        return await given_logprobs(self._processes.llm, scored, given)

    async def abort(self, sample_ids: Sequence[str]) -> None:
        with suppress(EngineDead, EngineDeadError):
            await self._processes.llm.abort(list(sample_ids))
