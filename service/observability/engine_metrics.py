"""Prometheus metrics of the engine: attention, CUDA graphs, speculative decoding, drafters.

They are updated from the engine's cumulative counts and status.
"""

from typing import get_args

from prometheus_client import CollectorRegistry

from engine.speculation.settings import MAX_DRAFT_TOKENS
from engine.types.feature_stats import (
    AttentionFallbackReason,
    CudaGraphStats,
    DrafterOutcome,
    DrafterStatus,
    DraftScope,
    KeptKvDropReason,
    KeptKvStats,
    KvReleaseReason,
    KvRetentionStats,
    SharedPrefixStats,
    SpeculationDecision,
    SpeculationSkipReason,
    SpeculationStats,
    TrainingState,
)
from service.observability.metric_declaration import MetricTable, cumulative_counter, gauge


class AttentionMetrics(MetricTable):
    """Metrics of attention that reads the KV of a prefix shared by several samples only once."""

    steps = cumulative_counter(
        "shared_prefix_steps", "Engine steps whose attention read each shared prefix only once"
    )
    rows = cumulative_counter(
        "shared_prefix_rows",
        "Samples whose shared prefix was read once, summed over the engine steps",
    )
    bytes_not_read = cumulative_counter(
        "shared_prefix_bytes_not_read",
        "Bytes of KV cache that shared-prefix attention did not read again",
    )
    steps_skipped = cumulative_counter(
        "shared_prefix_steps_skipped",
        "Engine steps that used vLLM's attention, by reason",
        reason=get_args(AttentionFallbackReason),
    )

    def update(self, stats: SharedPrefixStats) -> None:
        self.steps.update(stats.steps_grouped)
        self.rows.update(stats.rows_grouped)
        self.bytes_not_read.update(stats.prefix_bytes_not_read)
        self.steps_skipped.update_all(stats.steps_skipped)


class GraphMetrics(MetricTable):
    """Metrics of CUDA graphs planned within a memory budget: number, bytes, hits and misses."""

    graphs = gauge("graphs", "CUDA graphs captured by the plan")
    bytes = gauge(
        "graph_bytes",
        "Bytes of CUDA graphs per rank: the budget, the plan's estimate, and measured at capture",
        kind=("budget", "estimated", "measured"),
    )
    steps = cumulative_counter(
        "graph_steps",
        "Engine steps, by use of a planned CUDA graph",
        outcome=("hit", "miss", "mixed"),
    )
    misses = cumulative_counter(
        "graph_misses", "Engine steps without a planned CUDA graph, by shape", samples=(), tokens=()
    )

    def update(self, stats: CudaGraphStats) -> None:
        self.graphs.set(stats.num_graphs)
        self.bytes.labels("budget").set(stats.budget_bytes)
        self.bytes.labels("estimated").set(stats.estimated_bytes)
        self.bytes.labels("measured").set(stats.measured_bytes)
        misses = sum(stats.misses.values())
        self.steps.update_all({"hit": stats.hits, "mixed": stats.mixed, "miss": misses})
        for (samples, tokens), steps in stats.misses.items():
            self.misses.labels(str(samples), str(tokens) if tokens else "uneven").update(steps)


class KeptKvMetrics(MetricTable):
    """Metrics of KV that sessions and rollouts keep across weights updates."""

    tokens = gauge("kept_kv_tokens", "Cached tokens of sessions and rollouts that keep their KV")
    reused_tokens = cumulative_counter(
        "kept_kv_reused_tokens",
        "Prompt tokens found in the prefix cache with KV of older weights",
    )
    dropped_tokens = cumulative_counter(
        "kept_kv_dropped_tokens",
        "Cached tokens of sessions and rollouts that keep their KV, by the reason why they were "
        "dropped",
        reason=get_args(KeptKvDropReason),
    )

    def update(self, stats: KeptKvStats) -> None:
        self.tokens.set(stats.num_kept_tokens)
        self.reused_tokens.update(stats.num_reused_tokens)
        self.dropped_tokens.update_all(stats.num_dropped_tokens)


class SessionKvMetrics(MetricTable):
    """Metrics of KV that is retained while agent sessions are paused."""

    blocks = gauge("session_kv_retained_blocks", "KV cache blocks retained for paused sessions")
    sessions = gauge("session_kv_retained_sessions", "Agent sessions with retained KV")
    released = cumulative_counter(
        "session_kv_released_blocks",
        "KV cache blocks that were retained for a paused session, by the reason for their release; "
        "returned: the session's next call used them",
        reason=get_args(KvReleaseReason),
    )

    def update(self, stats: KvRetentionStats) -> None:
        self.blocks.set(stats.num_blocks)
        self.sessions.set(stats.num_sessions)
        self.released.update_all(stats.num_released)


class SpeculationMetrics(MetricTable):
    """Metrics of speculative decoding: drafts, acceptance and gain."""

    drafted_tokens = cumulative_counter(
        "speculation_drafted_tokens",
        "Drafted tokens that were verified, by the source of the draft",
        source=get_args(DraftScope),
    )
    accepted_tokens = cumulative_counter(
        "speculation_accepted_tokens",
        "Drafted tokens that were accepted, by the source of the draft",
        source=get_args(DraftScope),
    )
    drafts = cumulative_counter(
        "speculation_drafts",
        "Drafts that were verified, by length in tokens",
        length=range(1, MAX_DRAFT_TOKENS + 1),
    )
    steps = cumulative_counter(
        "speculation_steps",
        "Engine steps by the decision about their drafts",
        decision=get_args(SpeculationDecision),
    )
    skipped = cumulative_counter(
        "speculation_skipped",
        "Samples without drafts, or steps that failed to draft, by reason",
        reason=get_args(SpeculationSkipReason),
    )
    acceptance = gauge(
        "speculation_acceptance_ratio",
        "Accepted share of the tokens drafted since the last change of weights",
    )
    gain = gauge(
        "speculation_gain_ratio",
        "Speedup: estimated time of recent tokens without drafts, divided by their actual time",
    )
    cost_error = gauge(
        "speculation_cost_error_ratio", "Relative error of the predicted times of recent steps"
    )
    store_bytes = gauge("speculation_store_bytes", "Bytes of text in the draft store")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.update(SpeculationStats())

    def update(self, stats: SpeculationStats) -> None:
        self.drafted_tokens.update_all(stats.drafted)
        self.accepted_tokens.update_all(stats.accepted)
        self.drafts.update_all(stats.drafts)
        self.steps.update_all(stats.steps)
        self.skipped.update_all(stats.skipped)
        self.acceptance.set(stats.acceptance_ratio)
        self.gain.set(stats.gain_ratio)
        self.cost_error.set(stats.cost_error_ratio)
        self.store_bytes.set(stats.store_bytes)


class DrafterMetrics(MetricTable):
    """Metrics of the drafter model and its training; all are zero without a drafter."""

    acceptance = gauge(
        "drafter_acceptance_ratio",
        "Accepted share of the tokens drafted, by drafter and weights version",
        drafter=(),
        weights=(),
    )
    trials = cumulative_counter(
        "drafter_trials", "Finished tests of new drafters", outcome=get_args(DrafterOutcome)
    )
    training = gauge(
        "drafter_training",
        "1 for the current state of drafter training, 0 for the others",
        state=get_args(TrainingState),
    )
    trained_tokens = gauge("drafter_trained_tokens", "Tokens that the drafter was trained on")
    loss = gauge("drafter_loss", "Recent training loss of the drafter, nats per token")
    samples_dropped = cumulative_counter(
        "drafter_samples_dropped",
        "Completed samples that were not trained on because training could not keep up",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.update(DrafterStatus(serving=""))

    def update(self, status: DrafterStatus) -> None:
        """Update the metrics from the latest drafter status of the engine.

        Acceptance is exported only for the pairs of drafter and weights version in `status`, the
        latest few; older pairs are removed.
        """
        self.acceptance.clear()
        for pair in status.pairs:
            ratio = pair.accepted / max(pair.drafted, 1)
            self.acceptance.labels(pair.drafter, pair.weights).set(ratio)
        self.trials.update_all(status.outcomes)
        for state in get_args(TrainingState):
            self.training.labels(state).set(state == status.training)
        self.trained_tokens.set(status.num_tokens)
        self.loss.set(status.loss)
        self.samples_dropped.update(status.samples_dropped)
