"""Measurement of the divergence of kept KV on the running engine, in the service's process."""

import uuid
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.feature_stats import KeptKvStats, KvDivergence
from engine.io.vllm_requests import Generation
from engine.kv_versions.probes import TOP_K, ChainContexts, measure
from engine.launch.processes import VllmProcesses
from engine.types import Completion, SampleRequest, TopLogprobRows


class KvMeasurement:
    """Contexts of chains that limit the divergence of their KV, and the measured divergences.

    `contexts` has the chains. A measurement during which weights are loaded is discarded.
    """

    def __init__(self, processes: VllmProcesses, generation: Generation, max_tokens: int) -> None:
        self.contexts = ChainContexts(max_tokens)
        self._processes = processes
        self._generation = generation
        self._num_loads = 0
        self._divergences: Sequence[KvDivergence] = ()

    def on_load(self) -> None:
        """Discard a measurement in progress: weights are about to be loaded."""
        self._num_loads += 1

    def on_updated(self, *, keeps_kv: bool) -> None:
        self._divergences = ()
        self.contexts.on_update()
        if not keeps_kv:
            self.contexts.clear()

    def add_to(self, stats: KeptKvStats) -> KeptKvStats:
        return replace(stats, divergences=self._divergences)

    async def run(self, max_context_tokens: int, priority: int) -> None:
        """Measure chains, and let EngineCore apply the limits of new requests to the result."""
        num_loads, chosen = self._num_loads, self.contexts.chosen()
        requests = ProbeRequests(self._generation, max_context_tokens)
        found = await measure(requests, chosen, TOP_K, priority)
        if found and num_loads == self._num_loads:
            self._divergences = found
            by_lag = [(each.lag, each.kl) for each in found]
            # Every EngineCore receives this before any call of a later update, which resets it.
            await self._processes.call_cores("coppice_set_kv_divergence", by_lag)


class ProbeRequests:
    """The requests of probes. A sample is aborted if its task is cancelled.

    Nobody else can find the KV of a score, which has a cache salt of its own.
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
            token_ids, given, None, priority=priority, cache_salt=uuid.uuid4().hex
        )
