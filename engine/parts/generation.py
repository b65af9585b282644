"""Mixin of the vLLM engine for generation: submit, score, abort, flush of KV exports."""

from collections.abc import Awaitable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.adapters.feature import Adapters
from engine.kv_lifetime.feature import SessionKvRetention
from engine.kv_transfer.feature import PromptKvExport
from engine.parts.state import VllmState
from engine.requests.request_submission import Generation
from engine.requests.sampling_checks import SamplingChecks
from engine.types.samples import (
    Completion,
    FinishedListener,
    SampleRequest,
    Sampling,
    TopLogprobRows,
    VersionSpan,
)


class VllmGeneration(VllmState):
    """The `engine.protocol.generation.Generation` and `PromptKv` of vLLM."""

    _generation: Generation
    _sampling_checks: SamplingChecks

    def _create_generation(self) -> None:
        self._generation = Generation(
            self._processes,
            self._features.of(Adapters).loaded,
            num_engines=self._settings.data_parallel_size,
        )
        self._sampling_checks = SamplingChecks(self._processes)

    async def check_sampling(self, sampling: Sampling, client: str = "") -> None:
        await self._sampling_checks.check(sampling, client)

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        on_finished = self._finished_observer(samples)
        return await self._generation.submit(samples, self.info.max_context_tokens, on_finished)

    def _finished_observer(self, samples: Sequence[SampleRequest]) -> FinishedListener | None:
        """Listener for the completions of these samples, if anything learns from them."""
        listeners = self._features.finished_listeners()
        if any(sample.sampling.structured_outputs is not None for sample in samples):
            listeners.append(self._sampling_checks.on_finished)

        def observe(sample: SampleRequest, completion: Completion) -> None:
            for listener in listeners:
                listener(sample, completion)

        return observe if listeners else None

    def progress(self, sample_ids: Sequence[str]) -> list[tuple[VersionSpan, ...]]:
        return self._generation.progress(sample_ids)

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        return await self._generation.score(prompt, response, adapter)

    async def top_logprobs(
        self,
        prompt: Sequence[int],
        num_top_logprobs: int,
        adapter: str | None = None,
        given: NDArray[np.int32] | None = None,
    ) -> TopLogprobRows:
        if given is not None:
            return await self._generation.given_logprobs(prompt, given, adapter)
        return await self._generation.top_logprobs(prompt, num_top_logprobs, adapter)

    async def abort(self, sample_ids: Sequence[str]) -> None:
        await self._generation.abort(sample_ids)

    async def release_session_kv(self, session_ids: Sequence[str]) -> None:
        await self._features.of(SessionKvRetention).release(session_ids)

    async def flush_exports(self) -> None:
        await self._features.of(PromptKvExport).flush()
