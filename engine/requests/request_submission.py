"""Submission, scoring and abort of vLLM requests, in the service's process.

Each sample is one request with n=1, as in vLLM's own fan-out of larger n. So each sample can be
aborted, versioned and drafted separately. Siblings share their prompt's KV through prefix caching.
They are submitted in one iteration of the event loop, and in one message if they differ in id and
seed only, so that they are scheduled together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestState

from engine.adapters.loaded_adapters import LoadedAdapters
from engine.errors import EngineDead, RequestRefused
from engine.kv_lifetime import version_spans
from engine.launch.processes import VllmProcesses
from engine.launch.ranks.placement import Placement, running_tokens
from engine.requests import held_outputs, logprob_arrays, stop_strings
from engine.requests.logprobs import (
    ScoredTokens,
    given_logprobs,
    prompt_logprobs,
)
from engine.requests.pending_sample import PendingSample
from engine.requests.request_params import sampling_params
from engine.sampling import sample_copies
from engine.types.samples import Completion, SampleRequest, TopLogprobRows, VersionSpan


def _engine_input(sample: SampleRequest) -> Any:
    """vLLM's input of a sample, whose prompt may go on with tokens of an earlier part."""
    token_ids, salt = list(sample.prompt_token_ids), _salt(sample)
    if sample.multimodal_input is None:
        return tokens_input(token_ids, cache_salt=salt)
    found = {**sample.multimodal_input, "prompt_token_ids": token_ids}
    found.pop("prompt", None)
    found.pop("cache_salt", None)
    return found if salt is None else found | {"cache_salt": salt}


def _salt(sample: SampleRequest) -> str | None:
    return sample.cache_salt if sample.kept_kv is None else sample.kept_kv.chain


def _placed(sample: SampleRequest, rank: int | None) -> SampleRequest:
    """The sample on the engine with this rank."""
    if sample.data_parallel_rank == rank:
        return sample
    return replace(sample, data_parallel_rank=rank)


def _constrains_reasoning(sample: SampleRequest) -> bool:
    """True if a constraint holds from the first token on."""
    outputs = sample.sampling.structured_outputs
    return outputs is not None and outputs.enable_in_reasoning


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
        held_outputs.install()
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
            rank, pending = self._rank(samples), list[Awaitable[Completion]]()
            for run in self._runs([_placed(sample, rank) for sample in samples]):
                queues = await self._submit_run(run, max_context_tokens)
                pending += [
                    self._pending(queue, sample, on_finished)
                    for queue, sample in zip(queues, run, strict=True)
                ]
            return pending
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        except (VLLMClientError, ValueError, RequestRefused) as error:
            await self.abort([sample.id for sample in samples])
            raise RequestRefused(str(error)) from error

    def _runs(self, samples: list[SampleRequest]) -> Iterable[list[SampleRequest]]:
        """Samples that are submitted together, in the order of submission.

        With several engines, vLLM notes the engine of each request as it sends it, for aborts.
        """
        if self._num_engines > 1:
            return [[sample] for sample in samples]
        return sample_copies.runs_of_copies(samples)

    async def _submit_run(self, run: list[SampleRequest], max_context_tokens: int) -> list[Any]:
        """Queues of the outputs of samples that differ in id and seed only."""
        llm, sample = self._processes.llm, run[0]
        prompt, params = _engine_input(sample), sampling_params(sample, max_context_tokens)
        options: dict[str, Any] = {
            "lora_request": self._adapters.request(sample.adapter),
            "priority": sample.priority,
            "session_id": sample.session_id,
            "data_parallel_rank": sample.data_parallel_rank,
        }
        reasoning_ended = _constrains_reasoning(sample) or None
        if len(run) == 1:
            options["reasoning_ended"] = reasoning_ended
            return [await llm.add_request(sample.id, prompt, params, **options)]
        tasks = await llm.get_supported_tasks()
        request = llm.input_processor.process_inputs(
            sample.id, prompt, params, supported_tasks=tasks, **options
        )
        request.reasoning_ended = reasoning_ended
        return await sample_copies.add_copies(llm, request, run)

    def _pending(
        self,
        queue: Any,
        sample: SampleRequest,
        on_finished: Callable[[SampleRequest, Completion], None] | None,
    ) -> PendingSample:
        pending = PendingSample(
            queue, sample, partial(on_finished, sample) if on_finished else None
        )
        if sample.on_tokens is not None:
            held_outputs.attach(self._processes.llm, queue.request_id, pending.deliver)
        return pending

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
        """End samples, whose completions have all tokens that were generated until now."""
        with suppress(EngineDead, EngineDeadError):
            llm = self._processes.llm
            if any(map(llm.output_processor.external_req_ids.get, sample_ids)):
                await held_outputs.flush(self._processes, self._num_engines)
            await llm.abort(list(sample_ids))
