"""Data types of optional features' counters and status, exported as metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

AttentionFallbackReason = Literal[
    "not_built",
    "isa",
    "dtype",
    "kv_cache_dtype",
    "head_size",
    "block_size",
    "not_causal",
    "sliding_window",
    "soft_cap",
    "alibi",
    "sinks",
    "model_runner",
    "parallelism",
    "batch_invariant",
    "cuda_graphs",
    "query_length",
    "nothing_shared",
    "not_worth_it",
    "failed",
]
"""Reason why a step used vLLM's attention: limits of kernel and engine, then of the step."""
AttentionState = Literal["on", "off", "backend"] | AttentionFallbackReason
"""State of shared-prefix attention in a process.

on: used. off: by setting. backend: the model uses another attention backend. Otherwise the reason
why the kernel supports no layer.
"""
DraftScope = Literal["self", "siblings", "prompt", "all", "drafter"]
"""Source of a drafted token.

self: the sample's own text; siblings: other running samples of its group; prompt: earlier responses
to the same prompt; all: any text in the draft store; drafter: the draft model.
"""
SpeculationDecision = Literal[
    "drafted", "nothing_drafted", "not_worth_it", "baseline", "suspended", "probed"
]
"""Outcome of a step's drafts.

drafted: sent to verification. nothing_drafted: no drafts found. not_worth_it: verification would
cost more time than it saves. baseline: left out to measure the cost of a step without drafts.
suspended: drafting is suspended for a while because it cost more than it saved. probed: a single
token is drafted while suspended, to measure the drafter's acceptance.
"""
SpeculationSkipReason = Literal["disabled", "seeded", "sampling", "store_full", "failed"]
"""Reason why a sample or step was not speculated.

disabled: the request disables speculation. seeded: the request has a seed. sampling: the request
has a `min_p`, `logit_bias` or `min_tokens`, which vLLM cannot verify drafts with. store_full: the
draft store accepts no more concurrent responses to one prompt. failed: an error in a step, which is
logged.
"""
DrafterOutcome = Literal["promoted", "rolled_back", "failed"]
"""Result of a drafter's test.

promoted: its acceptance rate was at least as high. rolled_back: it was lower. failed: the drafter
could not be loaded.
"""
TrainingState = Literal["off", "running", "paused", "failed"]
"""State of drafter training.

off: not enabled. running: enabled. paused: suspended while the engine is busy. failed: stopped for
good because the trainer process exited too often.
"""

KvReleaseReason = Literal["returned", "allocation", "limit", "expired", "ended", "reset"]
"""Reason why a block of a paused session is not retained any more.

returned: the session's next call uses it. allocation: another request needs it. limit: sessions
would retain more than engine.session_kv_fraction. expired: 300 seconds have passed.
ended: the session has ended. reset: the prefix cache was reset, as by an activation of weights.
"""


KeptKvDropReason = Literal["reset", "lag", "prefix_recomputed"]
"""Reason why the cached KV of a chain was dropped.

reset: an activation or a reset of the prefix cache did not keep it. lag: it was older than the
request's `max_lag`. prefix_recomputed: other KV that it was computed with was computed again. KV
that is evicted because memory is needed does not count.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatus:
    """An optional feature: whether it is on, why, and the setting that changes that.

    `how_to_change` is empty if no setting does.
    """

    name: str
    enabled: bool
    reason: str
    how_to_change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixStats:
    """Counters of shared-prefix attention since the engine started."""

    steps_grouped: int = 0
    rows_grouped: int = 0
    prefix_bytes_not_read: int = 0
    steps_skipped: Mapping[AttentionFallbackReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKvStats:
    """KV of chains, which stays in the prefix cache across weights updates, in tokens.

    `num_kept_tokens` are cached now. The others count since the engine started: tokens found in the
    prefix cache with KV that is older than the weights, and cached tokens that were dropped.
    """

    num_kept_tokens: int = 0
    num_reused_tokens: int = 0
    num_dropped_tokens: Mapping[KeptKvDropReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counters of speculative decoding since the engine started.

    `drafts` counts drafts by their length. `version_drafted` and `version_accepted` count since the
    last change of weights. `gain_ratio` is the estimated time of the recent steps' tokens without
    drafts, divided by their actual time. `cost_error_ratio` is the relative error of the step time
    predictions. `store_bytes` is the current size of the draft store.
    """

    drafted: Mapping[DraftScope, int] = field(default_factory=dict)
    accepted: Mapping[DraftScope, int] = field(default_factory=dict)
    drafts: Mapping[int, int] = field(default_factory=dict)
    steps: Mapping[SpeculationDecision, int] = field(default_factory=dict)
    skipped: Mapping[SpeculationSkipReason, int] = field(default_factory=dict)
    version_drafted: int = 0
    version_accepted: int = 0
    gain_ratio: float = 1.0
    cost_error_ratio: float = 0.0
    store_bytes: int = 0

    @property
    def acceptance_ratio(self) -> float:
        """Accepted share of the tokens drafted since the last change of weights."""
        return self.version_accepted / max(self.version_drafted, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPairStats:
    """Drafted and accepted tokens of one drafter under one weights version.

    `first_accepted` of `first_drafted` first tokens were accepted. Unlike the rate over all drafted
    tokens, this rate does not depend on draft lengths.
    """

    drafter: str
    weights: str
    drafted: int
    accepted: int
    first_drafted: int
    first_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterStatus:
    """The serving drafter, the candidate that is or will be tested, and training progress.

    Training progress is the number of steps, the number of tokens and the recent loss per token.
    `pairs` are the most recent pairs of drafter and weights, the latest last.
    """

    serving: str
    candidate: str | None = None
    pairs: tuple[DrafterPairStats, ...] = ()
    outcomes: Mapping[DrafterOutcome, int] = field(default_factory=dict)
    training: TrainingState = "off"
    num_steps: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    samples_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphStats:
    """Number and size of the planned CUDA graphs, and steps that ran with and without one.

    `hits` are decode steps that ran with a graph. `misses` are decode steps without one, keyed by
    the number of samples, rounded up to a power of two, and the tokens per sample, 0 where these
    differed. `mixed` are steps that also prefilled or shared prefixes.
    """

    num_graphs: int = 0
    budget_bytes: int = 0
    estimated_bytes: int = 0
    measured_bytes: int = 0
    hits: int = 0
    mixed: int = 0
    misses: Mapping[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRetentionStats:
    """Retained KV of paused agent sessions; zeros if nothing is retained.

    `num_released` counts the blocks that are not retained any more: those that the session's next
    call has found, and those that were released for another reason.
    """

    num_blocks: int = 0
    num_sessions: int = 0
    num_released: Mapping[KvReleaseReason, int] = field(default_factory=dict)


Stats = TypeVar("Stats", SharedPrefixStats, KeptKvStats, CudaGraphStats, KvRetentionStats)


def total(engines: Sequence[Stats]) -> Stats:
    """Sum of the counters of data-parallel engines, field by field and key by key.

    Other fields are those of the first engine.
    """
    first = engines[0]
    summed = {
        name: _sum([getattr(engine, name) for engine in engines])
        for name in first.__dataclass_fields__
    }
    return replace(first, **summed)


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], int):
        return sum(values)
    if not isinstance(values[0], Mapping):
        return values[0]
    keys = dict.fromkeys(key for value in values for key in value)
    return {key: sum(value.get(key, 0) for value in values) for key in keys}
