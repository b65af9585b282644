"""Prometheus metrics of HTTP, rollouts, weights and cluster, and the registry of all metrics.

vLLM's metrics are in the default registry. docs/reference/metrics.md lists all metrics; dashboards
and alert rules use only metrics of that list.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from coppice.wire.problem_catalogue import PROBLEMS
from coppice.wire.rollouts import FinishReason, GroupAnswer, Outcome, SegmentFinish
from coppice.wire.weights import ActivationAnswer, ActivationMode
from service import __version__
from service.observability.engine_metrics import (
    AttentionMetrics,
    DrafterMetrics,
    GraphMetrics,
    KeptKvMetrics,
    SessionKvMetrics,
    SpeculationMetrics,
)
from service.observability.kv_metrics import KvReuseMetrics, PromptKvMetrics
from service.observability.metric_declaration import MetricTable, counter, gauge, histogram
from service.observability.session_metrics import SessionMetrics
from service.observability.vllm_metrics import VllmMetrics

LAG_INTERVAL_SECONDS = 0.1
LAG_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
DURATION_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
RATIO_BUCKETS = (1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30)


class ServerMetrics(MetricTable):
    """Metrics of the server's state: readiness, drain, engine heartbeat and event-loop lag."""

    build = gauge("build_info", "Always 1; the label is the version of Coppice", version=())
    ready = gauge("ready", "1 while /readyz answers 200")
    live = gauge("live", "1 while /livez answers 200")
    draining = gauge("draining", "1 once the server refuses new work because it shuts down")
    paused = gauge("paused", "1 while sampling is paused by request")
    sleep_level = gauge(
        "sleep_level", "Level at which the engine sleeps, with memory released; 0 if it is awake"
    )
    pause_leases_ended = counter(
        "pause_leases_ended", "Pauses that ended because their lease was not renewed"
    )
    engine_up = gauge("engine_up", "1 while the engine makes progress")
    heartbeat_age = gauge("engine_heartbeat_age_seconds", "Time since the engine's last heartbeat")
    event_loop_lag = histogram(
        "event_loop_lag_seconds", "Delay of a timer on the event loop", LAG_BUCKETS
    )


class HttpMetrics(MetricTable):
    """Metrics of HTTP requests and responses."""

    requests = counter("requests", "HTTP requests answered, by route and status", route=(), code=())
    request_seconds = histogram(
        "request_duration_seconds",
        "Time from a request's headers to the end of its response",
        DURATION_BUCKETS,
        route=(),
    )
    problems = counter("problems", "Problem documents sent, by problem code", problem=PROBLEMS)


class RolloutMetrics(MetricTable):
    """Metrics of rollouts, groups, samples and trees."""

    rollouts_running = gauge("rollouts_running", "Running rollouts")
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
        """Update the rollout metrics with a finished group.

        `sample_seconds`: the duration of each sample, in order of completion.
        """
        self.group_seconds.observe(max(sample_seconds, default=0.0))
        if len(sample_seconds) > 1 and (median := statistics.median(sample_seconds)) > 0:
            self.straggler_ratio.observe(max(sample_seconds) / median)
        self.groups.labels(group.outcome).inc()
        self.prompt_tokens.inc(group.num_prompt_tokens)
        self.prompt_tokens_cached.inc(group.num_cached_tokens)
        self.completion_tokens.inc(group.num_generated_tokens)
        for segment in group.segments or ():
            self.segments.labels(segment.finish_reason).inc()
        for sample in group.samples if group.segments is None else ():
            self.samples.labels(sample.finish_reason).inc()
            self.samples_stale.inc(len({span.version for span in sample.versions}) > 1)


class WeightMetrics(MetricTable):
    """Metrics of weights versions, their replication, and adapters."""

    sequence = gauge("weights_sequence", "Sequence number of the active weights version")
    age = gauge("weights_age_seconds", "Time since the active weights version was activated")
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
    delta_saved_bytes = counter(
        "weights_delta_saved_bytes",
        "Bytes of weights that were not transferred, because deltas are smaller",
    )
    fetches = counter(
        "weights_fetches",
        "Weights versions fetched because the cluster serves them",
        source=("path", "delta", "full", "failed"),
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
        "adapter_loads",
        "Attempts to load a LoRA adapter",
        outcome=("loaded", "refused", "failed"),
    )

    def record_upload(self, received_bytes: int, num_bytes: int) -> None:
        self.received_bytes.inc(received_bytes)
        self.delta_saved_bytes.inc(max(0, num_bytes - received_bytes))

    def record_activation(self, answer: ActivationAnswer) -> None:
        self.activations.labels(answer.mode).inc()
        self.paused_seconds.observe(answer.paused_seconds)


class ClusterMetrics(MetricTable):
    """Metrics of this replica's use of the cluster registry, and of redirects to other replicas."""

    up = gauge("cluster_up", "1 while the cluster registry is available")
    settled = gauge("cluster_settled", "1 once every live replica has had time to send a heartbeat")
    heartbeat_age = gauge(
        "cluster_heartbeat_age_seconds", "Time since the last successful heartbeat to the registry"
    )
    replicas = gauge("cluster_replicas", "Replicas in the latest view of the cluster registry")
    failures = counter(
        "cluster_failures",
        "Failed calls to the cluster registry",
        operation=("heartbeat", "claim", "release", "transfer", "holder", "leave"),
    )
    redirects = counter("cluster_redirects", "Requests redirected to another replica")
    handoffs = counter(
        "handoffs",
        "Rollouts, and sessions of one group, that a draining replica has offered to others, by "
        "whether one accepted",
        kind=("rollouts", "sessions"),
        outcome=("moved", "kept"),
    )
    unregistered_keys = counter(
        "cluster_unregistered_keys",
        "Idempotency keys that were not registered because the registry was unavailable",
    )


class Metrics:
    """All Prometheus metrics of one server, by subsystem.

    Each server has its own registry, so that one process can hold several servers. vLLM's metrics
    are in `vllm_registry`.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.vllm_registry = REGISTRY
        self.server = ServerMetrics(self.registry)
        self.http = HttpMetrics(self.registry)
        self.rollouts = RolloutMetrics(self.registry)
        self.weights = WeightMetrics(self.registry)
        self.prompt_kv = PromptKvMetrics(self.registry)
        self.kv_reuse = KvReuseMetrics(self.registry)
        self.sessions = SessionMetrics(self.registry)
        self.cluster = ClusterMetrics(self.registry)
        self.attention = AttentionMetrics(self.registry)
        self.kept_kv = KeptKvMetrics(self.registry)
        self.graphs = GraphMetrics(self.registry)
        self.session_kv = SessionKvMetrics(self.registry)
        self.speculation = SpeculationMetrics(self.registry)
        self.drafter = DrafterMetrics(self.registry)
        self.server.build.labels(__version__).set(1)

    def record_group(self, group: GroupAnswer, sample_seconds: Sequence[float]) -> None:
        """Update rollout, prompt-KV and KV-reuse metrics with a finished group.

        `sample_seconds` is as in `RolloutMetrics.record`.
        """
        self.rollouts.record(group, sample_seconds)
        self.prompt_kv.record(group)
        if group.kv_reuse is not None:
            self.kv_reuse.record(group.kv_reuse)

    def render(self) -> bytes:
        return generate_latest(VllmMetrics(self.vllm_registry)) + generate_latest(self.registry)


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    """Measure, until cancelled, how late the event loop runs timers that are due."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_SECONDS
        await asyncio.sleep(LAG_INTERVAL_SECONDS)
        observe(max(0.0, loop.time() - due))
