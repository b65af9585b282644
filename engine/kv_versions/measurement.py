"""Measurement of the divergence of kept KV on the running engine, in the service's process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.errors import FilesRestored
from engine.feature_stats import KeptKvStats, KvDivergence
from engine.io.vllm_requests import Generation
from engine.kv_versions.contexts import ChainContexts, ProbeChoice
from engine.kv_versions.divergence_limit import MeasuredDivergence
from engine.kv_versions.probes import (
    TOP_K,
    ProbeResult,
    mean_divergences,
    measure,
    owner_divergences,
)
from engine.launch.processes import VllmProcesses
from engine.types import Completion, KeptKv, SampleRequest, TopLogprobRows


class KvMeasurement:
    """Contexts of chains that limit the divergence of their KV, and the measured divergences.

    A measurement is continued until the next update, which discards it.
    """

    def __init__(self, processes: VllmProcesses, generation: Generation, max_tokens: int) -> None:
        self.contexts = ChainContexts(max_tokens)
        self._processes = processes
        self._generation = generation
        self._choice = ProbeChoice(self.contexts)
        self._results: list[ProbeResult] = []
        self._divergences: Sequence[KvDivergence] = ()
        self._limits = MeasuredDivergence()
        self._update_lock = asyncio.Lock()

    @asynccontextmanager
    async def updating(self, *, keeps_kv: bool) -> AsyncIterator[None]:
        """Context manager of a load of weights, which has failed if an exception leaves it.

        FilesRestored is an update, too, to weights that keep no KV.
        """
        async with self._update_lock:
            try:
                yield
            except FilesRestored:
                self._on_update(keeps_kv=False)
                raise
            self._on_update(keeps_kv=keeps_kv)

    def _on_update(self, *, keeps_kv: bool) -> None:
        self._choice = ProbeChoice(self.contexts)
        self._results, self._divergences, self._limits = [], (), MeasuredDivergence()
        self.contexts.on_update()
        if not keeps_kv:
            self.contexts.clear()

    def add_to(self, stats: KeptKvStats) -> KeptKvStats:
        return replace(stats, divergences=self._divergences)

    def max_lag(self, kept: KeptKv) -> int | None:
        """Greatest age of the KV that a chain may read now; None if it has no limit."""
        limits = [] if kept.max_lag is None else [kept.max_lag]
        if kept.max_kl is not None:
            limits.append(self._limits.max_lag(kept.owner, kept.max_kl))
        return min(limits, default=None)

    async def run(self, max_context_tokens: int, priority: int) -> None:
        """Measure chains, and let EngineCore apply the limits of new requests to the results."""
        choice = self._choice
        requests = ProbeRequests(self._generation, max_context_tokens)
        found = await measure(requests, choice, TOP_K, priority)
        async with self._update_lock:  # EngineCores receive them before a later update
            if found and choice is self._choice:
                self._results += found
                means = owner_divergences(self._results)
                await self._processes.call_cores("coppice_set_kv_divergence", means)
                self._limits.set(means)
                self._divergences = mean_divergences(self._results)


class ProbeRequests:
    """The requests of probes. A sample is aborted if its task is cancelled.

    The KV of a score is not cached: nobody may find it, and it would displace other KV.
    """

    def __init__(self, generation: Generation, max_context_tokens: int) -> None:
        self._generation = generation
        self._max_context_tokens = max_context_tokens

    async def sample(self, request: SampleRequest) -> Completion:
        try:
            [pending] = await self._generation.submit([request], self._max_context_tokens, None)
            return await pending
        except BaseException:
            await self._generation.abort([request.id])
            raise

    async def score(
        self, token_ids: Sequence[int], given: NDArray[np.int32], priority: int
    ) -> TopLogprobRows:
        return await self._generation.given_logprobs(
            token_ids, given, None, priority=priority, caches_kv=False
        )
