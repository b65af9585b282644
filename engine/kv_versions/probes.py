"""Divergence of kept KV from exact KV, measured with chains after a weights update.

A probe samples a few tokens after the context of a chain's last request, over the chain's KV, with
the most probable tokens at each position. The logprobs of these tokens over exact KV are computed
by prefilling context and tokens, as for a score. The KL divergence of both distributions is that of
the most probable tokens, with all others as one outcome, which is never above the divergence over
the whole vocabulary. It includes the rounding differences between decoding and prefilling.
"""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestRefused
from engine.feature_stats import KvDivergence
from engine.kv_versions.contexts import PROBE_TOKENS, ChainContext, ProbeChoice
from engine.types import Completion, SampleRequest, Sampling, TopLogprobRows

TOP_K: Final = 20
CONCURRENT_PROBES: Final = 4


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
    """KL divergence at each position of one probe, over an owner's KV of the age `lag`."""

    owner: str
    lag: int
    kl: list[float]


@dataclass(frozen=True, slots=True)
class NoResult:
    """Probe without a result, with the number of tokens that it computed.

    `has_older_kv` is false if it found that the chain has none any more.
    """

    num_computed_tokens: int
    has_older_kv: bool


async def measure(
    engine: ProbeEngine, choice: ProbeChoice, top_k: int, priority: int
) -> list[ProbeResult]:
    """Results of the chosen chains whose older KV was still cached."""
    results: list[ProbeResult] = []

    async def probe_next() -> None:
        while (found := choice.take()) is not None:
            lag, context = found
            result = await _probe(engine, context, top_k, priority)
            if isinstance(result, ProbeResult):
                results.append(result)
            else:
                choice.on_failed(lag, context, result.num_computed_tokens)
                if not result.has_older_kv:
                    choice.contexts.discard(context)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENT_PROBES):
            tasks.create_task(probe_next())
    return results


async def _probe(
    engine: ProbeEngine, context: ChainContext, top_k: int, priority: int
) -> ProbeResult | NoResult:
    """Measurement of one chain; no result if there is no older KV of it, or the weights changed."""
    try:
        kept = await engine.sample(_request(context, top_k, priority))
        if not kept.kv_lag or not kept.token_ids or len(kept.versions) != 1:
            num_prefilled = len(context.token_ids) - kept.num_cached_tokens
            return NoResult(num_prefilled + len(kept.token_ids), has_older_kv=bool(kept.kv_lag))
        assert kept.top_logprobs is not None, "top logprobs were requested"
        token_ids = [*context.token_ids, *kept.token_ids]
        top = kept.top_logprobs.token_ids[:, 1:]
        given = np.pad(top, ((len(context.token_ids), 0), (0, 0))).astype(np.int32)
        exact = await engine.score(token_ids, given, priority)
    except RequestRefused:
        return NoResult(0, has_older_kv=True)
    over_exact = exact.logprobs[-len(kept.token_ids) :, 1:]
    kl = _kl(kept.top_logprobs.logprobs[:, 1:], over_exact).tolist()
    return ProbeResult(owner=context.kept.owner, lag=kept.kv_lag, kl=kl)


def _request(context: ChainContext, top_k: int, priority: int) -> SampleRequest:
    return SampleRequest(
        id=uuid.uuid4().hex,
        prompt_token_ids=context.token_ids,
        sampling=Sampling(max_tokens=PROBE_TOKENS),
        priority=priority,
        num_top_logprobs=top_k,
        kept_kv=replace(context.kept, max_kl=None),
        speculation=False,
        data_parallel_rank=context.data_parallel_rank,
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


def mean_divergences(results: Iterable[ProbeResult]) -> list[KvDivergence]:
    """Means over the tokens of all chains, by the age of their KV."""
    by_lag: Mapping[int, list[ProbeResult]] = defaultdict(list)
    for result in results:
        by_lag[result.lag].append(result)
    return [_mean(lag, by_lag[lag]) for lag in sorted(by_lag)]


def owner_divergences(results: Sequence[ProbeResult]) -> list[tuple[str, int, float]]:
    """Owners with the ages of their KV, and the means over the tokens of their own chains."""
    return [
        (owner, mean.lag, mean.kl)
        for owner in sorted({result.owner for result in results})
        for mean in mean_divergences(each for each in results if each.owner == owner)
    ]


def _mean(lag: int, results: Sequence[ProbeResult]) -> KvDivergence:
    values = [kl for result in results for kl in result.kl]
    return KvDivergence(
        lag=lag, kl=sum(values) / len(values), num_chains=len(results), num_tokens=len(values)
    )
