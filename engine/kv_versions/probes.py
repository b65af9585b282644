"""Divergence of kept KV from exact KV, measured with chains after a weights update.

A probe samples a few tokens after the context of a chain's last request, over the chain's KV, with
the most probable tokens at each position. The logprobs of these tokens over exact KV are computed
by prefilling context and tokens, as for a score. The KL divergence of both distributions is that of
the most probable tokens, with all others as one outcome, which is never above the divergence over
the whole vocabulary. It includes the rounding differences between decoding and prefilling.
"""

import asyncio
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestRefused
from engine.feature_stats import KvDivergence
from engine.types import Completion, KeptKv, SampleRequest, Sampling, TopLogprobRows

PROBE_TOKENS: Final = 16
"""Maximum number of tokens that a probe samples."""
TOP_K: Final = 20
CHAINS_PER_LAG: Final = 4
CONCURRENT_PROBES: Final = 4
MAX_CONTEXTS: Final = 256
RETAINED_BUDGETS: Final = 8
"""Number of retained tokens of contexts, in multiples of the budget of one measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainContext:
    """Prompt of the last request of a chain, and the age of its KV at the update `num_updates`."""

    kept: KeptKv
    token_ids: Sequence[int]
    num_updates: int
    lag: int

    @property
    def num_probe_tokens(self) -> int:
        return len(self.token_ids) + PROBE_TOKENS


class ChainContexts:
    """Contexts of the chains that ended a request last, of at most `max_tokens` tokens each."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._contexts: OrderedDict[str, ChainContext] = OrderedDict()
        self._num_tokens = 0
        self._num_updates = 0

    def on_finished(self, sample: SampleRequest, completion: Completion) -> None:
        """Retain the context of a sample whose chain limits the divergence of its KV."""
        kept = sample.kept_kv
        if kept is None or kept.max_kl is None or sample.adapter is not None:
            return
        context = ChainContext(
            kept=kept,
            token_ids=sample.prompt_token_ids,
            num_updates=self._num_updates,
            lag=completion.kv_lag,
        )
        self._remove(kept.chain)
        if context.num_probe_tokens <= self._max_tokens:
            self._contexts[kept.chain] = context
            self._num_tokens += len(context.token_ids)
        while self._num_tokens > RETAINED_BUDGETS * self._max_tokens or (
            len(self._contexts) > MAX_CONTEXTS
        ):
            self._remove(next(iter(self._contexts)))

    def on_update(self) -> None:
        self._num_updates += 1

    def clear(self) -> None:
        self._contexts.clear()
        self._num_tokens = 0

    def chosen(self) -> list[ChainContext]:
        """Contexts to measure within the budget: one of each age, then a second one, and so on."""
        by_lag = defaultdict[int, list[ChainContext]](list)
        for context in reversed(self._contexts.values()):
            if (lag := self._lag(context)) and _may_be_read(context.kept, lag):
                by_lag[lag].append(context)
        left, chosen = self._max_tokens, list[ChainContext]()
        for place in range(CHAINS_PER_LAG):
            for lag in sorted(by_lag):
                for candidate in by_lag[lag][place : place + 1]:
                    if candidate.num_probe_tokens <= left:
                        left -= candidate.num_probe_tokens
                        chosen.append(candidate)
        return chosen

    def _lag(self, context: ChainContext) -> int:
        """Age that the KV of a chain has now, if its blocks are still cached."""
        return self._num_updates - context.num_updates + context.lag

    def _remove(self, chain: str) -> None:
        if (context := self._contexts.pop(chain, None)) is not None:
            self._num_tokens -= len(context.token_ids)


def _may_be_read(kept: KeptKv, lag: int) -> bool:
    return kept.max_lag is None or lag <= kept.max_lag


class ProbeEngine(Protocol):
    """Requests that a probe makes.

    sample: over the KV of the request's chain.
    score: logprobs of given tokens [tokens, m] at the positions of `token_ids`, over exact KV.
    """

    async def sample(self, request: SampleRequest) -> Completion: ...

    async def score(
        self, token_ids: Sequence[int], given: NDArray[np.int32], priority: int
    ) -> TopLogprobRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """KL divergence at each position of one probe, over KV of the age `lag`."""

    lag: int
    kl: list[float]


async def measure(
    engine: ProbeEngine, contexts: Iterable[ChainContext], top_k: int, priority: int
) -> list[KvDivergence]:
    """Divergences by age, of the chains whose KV was still cached."""
    slots = asyncio.Semaphore(CONCURRENT_PROBES)

    async def one(context: ChainContext) -> ProbeResult | None:
        async with slots:
            return await _probe(engine, context, top_k, priority)

    async with asyncio.TaskGroup() as tasks:
        probes = [tasks.create_task(one(context)) for context in contexts]
    return _means(result for probe in probes if (result := probe.result()) is not None)


async def _probe(
    engine: ProbeEngine, context: ChainContext, top_k: int, priority: int
) -> ProbeResult | None:
    """Measurement of one chain; None if there is no older KV of it, or the weights changed."""
    try:
        kept = await engine.sample(_request(context, top_k, priority))
        if not kept.kv_lag or not kept.token_ids or len(kept.versions) != 1:
            return None
        assert kept.top_logprobs is not None, "top logprobs were requested"
        token_ids = [*context.token_ids, *kept.token_ids]
        top = kept.top_logprobs.token_ids[:, 1:]
        given = np.pad(top, ((len(context.token_ids), 0), (0, 0))).astype(np.int32)
        exact = await engine.score(token_ids, given, priority)
    except RequestRefused:
        return None
    over_exact = exact.logprobs[-len(kept.token_ids) :, 1:]
    return ProbeResult(
        lag=kept.kv_lag, kl=_kl(kept.top_logprobs.logprobs[:, 1:], over_exact).tolist()
    )


def _request(context: ChainContext, top_k: int, priority: int) -> SampleRequest:
    return SampleRequest(
        id=uuid.uuid4().hex,
        prompt_token_ids=context.token_ids,
        sampling=Sampling(max_tokens=PROBE_TOKENS),
        priority=priority,
        num_top_logprobs=top_k,
        kept_kv=replace(context.kept, max_kl=None),
        speculation=False,
    )


def _kl(kept: NDArray[np.float32], exact: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL divergence at each position, from the logprobs [positions, k] of the same tokens."""
    p, q = (_with_rest(np.exp(logprobs.astype(np.float64))) for logprobs in (kept, exact))
    ratio = np.log(np.where(p > 0, p, 1) / np.maximum(np.where(p > 0, q, 1), TINY))
    found: NDArray[np.float64] = np.maximum((p * ratio).sum(axis=1), 0.0)
    return found


TINY: Final = np.finfo(np.float64).tiny
REST_ERROR: Final = 1e-6
"""Total of probabilities in float32 up to which the probability of all other tokens is noise."""


def _with_rest(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    rest = 1 - probabilities.sum(axis=1, keepdims=True)
    return np.hstack([probabilities, np.maximum(rest, REST_ERROR)])


def _means(results: Iterable[ProbeResult]) -> list[KvDivergence]:
    by_lag: Mapping[int, list[ProbeResult]] = defaultdict(list)
    for result in results:
        by_lag[result.lag].append(result)
    return [_mean(lag, by_lag[lag]) for lag in sorted(by_lag)]


def _mean(lag: int, results: Sequence[ProbeResult]) -> KvDivergence:
    values = [kl for result in results for kl in result.kl]
    return KvDivergence(
        lag=lag, kl=sum(values) / len(values), num_chains=len(results), num_tokens=len(values)
    )
