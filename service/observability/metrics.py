"""Prometheus metrics of the service, one table per subsystem.

vLLM's metrics are in the default registry. docs/metrics.md lists all metrics; dashboards and alert
rules use only metrics of that list.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from coppice.wire.control import KvStatus
from coppice.wire.kv import KvReason
from coppice.wire.problems import PROBLEMS
from coppice.wire.reuse import ReuseAnswer, ReuseMode, ReuseReason
from coppice.wire.rollouts import FinishReason, GroupAnswer, Outcome, SegmentFinish
from coppice.wire.weights import ActivationAnswer, ActivationMode
from service import __version__
from service.adapters.manager import AdapterLoadOutcome
from service.cluster.membership import ClusterMembership
from service.http.connections import Connections, ShedOutcome
from service.kv_reuse.anchors import AnchorOutcome, AnchorStore
from service.kv_reuse.span_cache import SpanCache
from service.kv_reuse.spans import APPROXIMATE_MODES
from service.observability.engine_metrics import (
    AttentionMetrics,
    DrafterMetrics,
    GraphMetrics,
    SpeculationMetrics,
)
from service.observability.metric_table import (
    MetricTable,
    counter,
    cumulative_counter,
    gauge,
    histogram,
)
from service.prompt_kv.socket_sender import TransferOutcome
from service.weights.replication.downloader import FetchMethod
from service.weights.replication.status import ReplicationStatus

LAG_INTERVAL_SECONDS = 0.1
LAG_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
DURATION_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
RATIO_BUCKETS = (1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30)
ARENA_STATES = ("free", "reserved", "leased", "quarantined")
REUSE_TOKEN_KINDS = ("reused", "computed", "prepared")
ANCHOR_REASONS = frozenset({"no_anchor", "not_shareable"})


class ServerMetrics(MetricTable):
    """Metrics of the server's state."""

    build = gauge("build_info", "Always 1; the label is the version of Coppice", version=())
    ready = gauge("ready", "1 while /readyz answers 200")
    live = gauge("live", "1 while /livez answers 200")
    draining = gauge("draining", "1 once the server refuses new work because it shuts down")
    paused = gauge("paused", "1 while sampling is paused by request")
    engine_up = gauge("engine_up", "1 while the engine makes progress")
    heartbeat_age = gauge("engine_heartbeat_age_seconds", "Time since the engine's last heartbeat")
    event_loop_lag = histogram(
        "event_loop_lag_seconds", "Delay of a timer on the event loop", LAG_BUCKETS
    )


class HttpMetrics(MetricTable):
    """Metrics of connections and requests."""

    requests = counter("requests", "HTTP requests answered, by route and status", route=(), code=())
    request_seconds = histogram(
        "request_duration_seconds",
        "Time from a request's headers to the end of its response",
        DURATION_BUCKETS,
        route=(),
    )
    problems = counter("problems", "Problem documents sent, by problem code", problem=PROBLEMS)
    connections = gauge("connections", "Open connections", port=("callers", "operators"))
    connections_limit = gauge("connections_limit", "Maximum number of connections per port")
    connections_shed = counter(
        "connections_shed",
        "Connections closed or refused because of the connection limit",
        outcome=get_args(ShedOutcome),
    )
    compat_fields = counter(
        "compat_fields",
        "Request fields of other servers' APIs that were ignored",
        kind=("dropped", "unknown"),
    )
    replies_not_parsed = counter(
        "replies_not_parsed",
        "Responses returned as plain text because the tool or reasoning parser failed",
    )

    def update(self, callers: Connections, operators: Connections) -> None:
        self.connections.labels("callers").set(callers.num_open)
        self.connections.labels("operators").set(operators.num_open)
        self.connections_limit.set(callers.limit)


class RolloutMetrics(MetricTable):
    """Metrics of rollouts, groups, samples and trees."""

    rollouts_running = gauge("rollouts_running", "Rollouts without a response yet")
    samples_running = gauge("samples_running", "Samples in the engine")
    samples_admitted = gauge("samples_admitted", "Admitted samples: running and waiting")
    samples_limit = gauge("samples_limit", "Maximum number of admitted samples")
    groups = counter("groups", "Finished groups, by outcome", outcome=get_args(Outcome))
    samples = counter(
        "samples", "Finished samples, by finish reason", finish_reason=get_args(FinishReason)
    )
    segments = counter(
        "segments",
        "Finished tree segments, by finish reason",
        finish_reason=get_args(SegmentFinish),
    )
    samples_stale = counter("samples_stale", "Samples with tokens of more than one weights version")
    prompt_tokens = counter("prompt_tokens", "Prompt tokens, counted once per group")
    prompt_tokens_cached = counter(
        "prompt_tokens_cached", "Prompt tokens found in the prefix cache by a group's first sample"
    )
    completion_tokens = counter("completion_tokens", "Sampled tokens")
    group_seconds = histogram(
        "group_duration_seconds",
        "Time from a group's submission to its last sample",
        DURATION_BUCKETS,
    )
    straggler_ratio = histogram(
        "group_straggler_ratio",
        "Duration of a group's slowest sample divided by that of its median sample",
        RATIO_BUCKETS,
    )

    def record(self, group: GroupAnswer, sample_seconds: Sequence[float]) -> None:
        """Record a finished group.

        `sample_seconds`: the duration of each sample, in order of completion.
        """
        self.group_seconds.observe(max(sample_seconds, default=0.0))
        if len(sample_seconds) > 1 and (median := statistics.median(sample_seconds)) > 0:
            self.straggler_ratio.observe(max(sample_seconds) / median)
        self.groups.labels(group.outcome).inc()
        self.prompt_tokens.inc(group.num_prompt_tokens)
        self.prompt_tokens_cached.inc(group.num_cached_tokens)
        self.completion_tokens.inc(group.num_completion_tokens)
        for segment in group.segments or ():
            self.segments.labels(segment.finish_reason).inc()
        for sample in group.samples if group.segments is None else ():
            self.samples.labels(sample.finish_reason).inc()
            self.samples_stale.inc(len({span.version for span in sample.versions}) > 1)


class WeightMetrics(MetricTable):
    """Metrics of weights versions, their replication, and adapters."""

    sequence = gauge("weights_sequence", "Sequence number of the active weights version")
    activations = counter(
        "activations", "Activations of weights versions", mode=get_args(ActivationMode)
    )
    paused_seconds = histogram(
        "activation_paused_seconds",
        "Time that sampling was paused by an activation",
        DURATION_BUCKETS,
    )
    received_bytes = counter(
        "weights_received_bytes", "Bytes of weights received from trainers and replicas"
    )
    spared_bytes = counter("weights_spared_bytes", "Bytes of weights not sent thanks to deltas")
    pulls = counter(
        "weights_pulls",
        "Weights versions fetched because the cluster serves them",
        way=get_args(FetchMethod),
    )
    skew = gauge(
        "weights_skew", "Difference between the newest and the oldest sequence number served"
    )
    replicas_behind = gauge(
        "weights_replicas_behind", "Replicas that serve an older version than the target version"
    )
    replicas_failed = gauge(
        "weights_replicas_failed", "Replicas that could not fetch or load the target version"
    )
    adapters = gauge("adapters", "LoRA adapters loaded in the engine")
    adapter_loads = counter(
        "adapter_loads", "Attempts to load a LoRA adapter", outcome=get_args(AdapterLoadOutcome)
    )

    def record_upload(self, received_bytes: int, num_bytes: int) -> None:
        self.received_bytes.inc(received_bytes)
        self.spared_bytes.inc(max(0, num_bytes - received_bytes))

    def record_activation(self, answer: ActivationAnswer) -> None:
        self.activations.labels(answer.mode).inc()
        self.paused_seconds.observe(answer.paused_seconds)

    def update(self, replication: ReplicationStatus) -> None:
        self.skew.set(replication.skew())
        self.replicas_behind.set(replication.num_behind())
        self.replicas_failed.set(replication.num_failed())


class PromptKvMetrics(MetricTable):
    """Metrics of exported prompt KV."""

    exports = counter(
        "kv_exports",
        "Requested exports of prompts and tree paths: a handle, or the reason for none",
        outcome=("handle", *get_args(KvReason)),
    )
    bytes = gauge("kv_bytes", "Bytes of the prompt KV arena", state=ARENA_STATES)
    handles = gauge("kv_handles", "Handles with a running lease, or of a running rollout")
    transfers = gauge("kv_transfers", "Open downloads of prompt KV, including waiting ones")
    transfers_limit = gauge(
        "kv_transfers_limit", "Maximum number of downloads that are sent concurrently"
    )
    transfers_ended = counter(
        "kv_transfers_ended", "Ended downloads of prompt KV", outcome=get_args(TransferOutcome)
    )
    sent_bytes = counter("kv_sent_bytes", "Bytes of prompt KV sent over HTTP")

    def record(self, group: GroupAnswer) -> None:
        for part in (group, *(group.segments or ())):
            if part.kv is not None or part.kv_reason is not None:
                self.exports.labels(part.kv_reason or "handle").inc()

    def update(self, status: KvStatus) -> None:
        for state in ARENA_STATES:
            self.bytes.labels(state).set(getattr(status, f"{state}_bytes"))
        self.handles.set(status.handles)


class KvReuseMetrics(MetricTable):
    """KV reuse metrics; the reuse rate is reused / (reused + computed) tokens."""

    groups = counter(
        "reuse_groups",
        "Groups with prompt spans: done, or the reason why the whole prompt was prefilled",
        mode=(),
        outcome=(),
    )
    tokens = counter(
        "reuse_tokens",
        "Prompt tokens of these groups, and of spans prefilled alone for them",
        mode=get_args(ReuseMode),
        kind=REUSE_TOKEN_KINDS,
    )
    round_trips = counter(
        "reuse_round_trips",
        "Consecutive engine requests before the first token of these groups",
        mode=get_args(ReuseMode),
    )
    segments = gauge("reuse_segments", "Spans with cached KV")
    bytes = gauge("reuse_bytes", "Bytes of cached KV of spans and anchors, and of running prompts")
    anchors = gauge(
        "reuse_anchors", "Cached prompts that the KV of other prompts is predicted from"
    )
    anchor_fates = cumulative_counter(
        "reuse_anchor_fates",
        "Anchors made, evicted, outdated by new weights, and not written completely",
        fate=get_args(AnchorOutcome),
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for mode in get_args(ReuseMode):
            for outcome in ("done", *_reasons(mode)):
                self.groups.labels(mode, outcome)

    def record(self, reuse: ReuseAnswer) -> None:
        self.groups.labels(reuse.mode, reuse.reason or "done").inc()
        for kind in REUSE_TOKEN_KINDS:
            self.tokens.labels(reuse.mode, kind).inc(getattr(reuse, f"tokens_{kind}"))
        self.round_trips.labels(reuse.mode).inc(reuse.round_trips)

    def update(self, cache: SpanCache, anchors: AnchorStore) -> None:
        self.anchors.set(anchors.num_anchors)
        self.segments.set(cache.num_spans)
        self.bytes.set(cache.num_bytes)
        self.anchor_fates.update_all(anchors.num_by_outcome)


def _reasons(mode: ReuseMode) -> list[ReuseReason]:
    if mode not in APPROXIMATE_MODES:
        return []
    return [r for r in get_args(ReuseReason) if mode == "anchors" or r not in ANCHOR_REASONS]


class ClusterMetrics(MetricTable):
    """Metrics of the cluster registry."""

    up = gauge("directory_up", "1 while the cluster registry is available")
    settled = gauge(
        "directory_settled", "1 once every live replica has had time to send a heartbeat"
    )
    contact_age = gauge(
        "directory_contact_age_seconds", "Time since the last successful heartbeat to the registry"
    )
    replicas = gauge("directory_replicas", "Replicas in the latest view of the cluster registry")
    failures = counter(
        "directory_failures",
        "Failed calls to the cluster registry",
        operation=("beat", "claim", "release", "leave"),
    )
    redirects = counter("directory_redirects", "Requests redirected to another replica")
    unshared_keys = counter(
        "directory_unshared_keys",
        "Idempotency keys that were not registered because the registry was unavailable",
    )

    def update(self, fleet: ClusterMembership) -> None:
        self.up.set(not fleet.unavailable)
        self.settled.set(fleet.is_settled)
        self.contact_age.set(fleet.contact_age_seconds)
        self.replicas.set(len(fleet.view.replicas))


class Metrics:
    """Metrics of one server.

    Each server has its own registry, so that one process can hold several servers.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.server = ServerMetrics(self.registry)
        self.http = HttpMetrics(self.registry)
        self.rollouts = RolloutMetrics(self.registry)
        self.weights = WeightMetrics(self.registry)
        self.prompt_kv = PromptKvMetrics(self.registry)
        self.kv_reuse = KvReuseMetrics(self.registry)
        self.cluster = ClusterMetrics(self.registry)
        self.attention = AttentionMetrics(self.registry)
        self.graphs = GraphMetrics(self.registry)
        self.speculation = SpeculationMetrics(self.registry)
        self.drafter = DrafterMetrics(self.registry)
        self.server.build.labels(__version__).set(1)

    def record_group(self, group: GroupAnswer, sample_seconds: Sequence[float]) -> None:
        """Record a finished group; see `RolloutMetrics.record`."""
        self.rollouts.record(group, sample_seconds)
        self.prompt_kv.record(group)
        if group.reuse is not None:
            self.kv_reuse.record(group.reuse)

    def render(self) -> bytes:
        return generate_latest(REGISTRY) + generate_latest(self.registry)


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    """Measure how late the event loop runs a timer that is due."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_SECONDS
        await asyncio.sleep(LAG_INTERVAL_SECONDS)
        observe(max(0.0, loop.time() - due))
