"""Prometheus metrics of prompt-KV exports and of KV reuse between prompts."""

from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from coppice.wire.kv_reuse import KvReuseAnswer, KvReuseMode, KvReuseReason
from coppice.wire.prompt_kv import KvReason
from coppice.wire.rollouts import GroupAnswer
from coppice.wire.status import KvStatus
from service.observability.metric_declaration import MetricTable, counter, cumulative_counter, gauge

ObservationOutcome = Literal["created", "evicted", "outdated", "failed"]
ARENA_STATES = ("free", "reserved", "leased", "quarantined")
REUSE_TOKEN_KINDS = ("reused", "computed", "prepared")
PREDICTION_REASONS = frozenset({"no_observations", "entropy_too_high"})


class PromptKvMetrics(MetricTable):
    """Metrics of prompt KV: exports, arena memory, handles and downloads."""

    exports = counter(
        "kv_exports",
        "Requested exports of prompts and tree paths: a handle, or the reason for none",
        outcome=("handle", *get_args(KvReason)),
    )
    bytes = gauge("kv_bytes", "Bytes of the prompt KV arena", state=ARENA_STATES)
    handles = gauge("kv_handles", "Handles with a running lease, or of a running rollout")
    transfers = gauge("kv_transfers", "Open downloads of prompt KV")
    sent_bytes = counter("kv_sent_bytes", "Bytes of prompt KV sent over HTTP")

    def record(self, group: GroupAnswer) -> None:
        for part in (group, *(group.segments or ())):
            if part.kv is not None or part.kv_reason is not None:
                self.exports.labels(part.kv_reason or "handle").inc()

    def update(self, status: KvStatus) -> None:
        for state in ARENA_STATES:
            self.bytes.labels(state).set(getattr(status, f"{state}_bytes"))
        self.handles.set(status.num_handles)


class KvReuseMetrics(MetricTable):
    """Metrics of KV reuse between prompts.

    The reuse rate is reused / (reused + computed) tokens.
    """

    groups = counter(
        "kv_reuse_groups",
        "Groups with prompt spans, by success or the reason why the whole prompt was prefilled",
        mode=(),
        outcome=(),
    )
    tokens = counter(
        "kv_reuse_tokens",
        "Prompt tokens of groups with prompt spans, and of spans prefilled alone",
        mode=get_args(KvReuseMode),
        kind=REUSE_TOKEN_KINDS,
    )
    round_trips = counter(
        "kv_reuse_round_trips",
        "Consecutive engine requests before the first token of groups with prompt spans",
        mode=get_args(KvReuseMode),
    )
    spans = gauge("kv_reuse_spans", "Spans with cached KV")
    bytes = gauge(
        "kv_reuse_bytes",
        "Bytes of cached KV of spans and observations, and of running prompts",
    )
    observations = gauge(
        "kv_reuse_observations",
        "Observations: cached prompts from which the KV of other prompts is predicted",
    )
    observation_outcomes = cumulative_counter(
        "kv_reuse_observation_outcomes",
        "Observations created, evicted, outdated by new weights, or not written completely",
        outcome=get_args(ObservationOutcome),
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for mode in get_args(KvReuseMode):
            for outcome in ("done", *_reasons(mode)):
                self.groups.labels(mode, outcome)

    def record(self, reuse: KvReuseAnswer) -> None:
        self.groups.labels(reuse.mode, reuse.reason or "done").inc()
        for kind in REUSE_TOKEN_KINDS:
            self.tokens.labels(reuse.mode, kind).inc(getattr(reuse, f"num_{kind}_tokens"))
        self.round_trips.labels(reuse.mode).inc(reuse.num_round_trips)


def _reasons(mode: KvReuseMode) -> list[KvReuseReason]:
    if mode == "off":
        return []
    return [r for r in get_args(KvReuseReason) if mode == "predict" or r not in PREDICTION_REASONS]
