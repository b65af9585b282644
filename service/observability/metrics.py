"""The service's Prometheus metrics, with the prefix coppice_.

vLLM's metrics are in the default registry. Label values come from fixed sets and are initialized to
zero, so that `rate` is defined for rare events too. docs/metrics.md lists all metrics; dashboards
and alert rules use only metrics of that list.
"""

import statistics
from collections import Counter as TallyCounter
from collections.abc import Sequence
from typing import get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from coppice.wire.control import KvStatus
from coppice.wire.kv import KvReason
from coppice.wire.problems import PROBLEMS
from coppice.wire.rollouts import FinishReason, GroupAnswer, Outcome, SegmentFinish
from coppice.wire.weights import ActivationAnswer, ActivationMode
from engine.stats import AttentionFallbackReason, CudaGraphStats, SharedPrefixStats
from service import __version__
from service.adapters.manager import AdapterLoadOutcome
from service.cluster.membership import ClusterMembership
from service.http.connections import ConnectionMetrics
from service.kv_reuse.metrics import KvReuseMetrics
from service.observability.drafter_metrics import DrafterMetrics
from service.observability.speculation_metrics import SpeculationMetrics
from service.prompt_kv.socket_sender import TransferOutcome
from service.weights.replication.downloader import FetchMethod
from service.weights.replication.status import ReplicationStatus

LAG_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
DURATION_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
DIRECTORY_OPERATIONS = ("beat", "claim", "release", "leave")
RATIO_BUCKETS = (1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30)


class Metrics:
    """Metrics of one server.

    Each server has its own registry, so that one process can hold several servers.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.groups = self._counter("groups", "Groups by how they ended", "outcome")
        self.samples = self._counter("samples", "Samples by how they ended", "finish_reason")
        self.segments = self._counter(
            "segments", "Segments of trees by how they ended", "finish_reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, once a group")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens that a group's first sample found cached"
        )
        self.completion_tokens = self._counter("completion_tokens", "Tokens sampled")
        self.requests = self._counter("requests", "HTTP requests answered", "route", "code")
        self.problems = self._counter("problems", "Problems answered, by their code", "problem")
        self.connections = ConnectionMetrics(self.registry)
        self.samples_stale = self._counter(
            "samples_stale", "Samples with tokens of a version that was not active at their end"
        )
        self.compat_fields = self._counter(
            "compat_fields", "Fields of other servers' clients that were not used", "kind"
        )
        self.replies_not_parsed = self._counter(
            "replies_not_parsed", "Responses that the engine's parsers failed on, answered as text"
        )
        self.activations = self._counter("activations", "Weights activated", "mode")
        self.weights_received_bytes = self._counter(
            "weights_received_bytes", "Bytes that weights came in, from trainers and replicas"
        )
        self.weights_spared_bytes = self._counter(
            "weights_spared_bytes", "Bytes of weights that deltas did not have to bring"
        )
        self.weights_pulls = self._counter(
            "weights_pulls", "Versions brought from elsewhere by how they came", "way"
        )
        self.weights_skew = self._gauge(
            "weights_skew", "Sequence of the newest version that a replica serves less the oldest's"
        )
        self.weights_behind = self._gauge(
            "weights_replicas_behind", "Replicas that serve an older version than all are to serve"
        )
        self.weights_failed = self._gauge(
            "weights_replicas_failed", "Replicas that could not bring or load a version"
        )
        self.adapters = self._gauge("adapters", "LoRA adapters that the engine holds")
        self.adapter_loads = self._counter(
            "adapter_loads", "Adapters that were to be loaded by what became of it", "outcome"
        )
        self.group_seconds = Histogram(
            "coppice_group_duration_seconds",
            "Time from a group's submission to its last sample",
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.straggler_ratio = Histogram(
            "coppice_group_straggler_ratio",
            "Time of a group's last sample over that of its median one",
            buckets=RATIO_BUCKETS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "coppice_request_duration_seconds",
            "Time from a request's head to the end of its answer",
            ["route"],
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.paused_seconds = Histogram(
            "coppice_activation_paused_seconds",
            "Time that samples stood still for an activation",
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.rollouts_running = self._gauge("rollouts_running", "Rollouts not yet answered")
        self.samples_running = self._gauge("samples_running", "Samples in the engine")
        self.samples_admitted = self._gauge("samples_admitted", "Samples that count as under way")
        self.samples_limit = self._gauge("samples_limit", "Samples that may be under way at most")
        self.weights_sequence = self._gauge("weights_sequence", "Sequence of the active version")
        self.paused = self._gauge("paused", "1 while sampling stands still by request")
        self.draining = self._gauge("draining", "1 once the server takes nothing new")
        self.ready = self._gauge("ready", "1 while /readyz answers 200")
        self.live = self._gauge("live", "1 while /livez answers 200")
        self.engine_up = self._gauge("engine_up", "1 while the engine makes progress")
        self.heartbeat_age = self._gauge(
            "engine_heartbeat_age_seconds", "Time since the engine's last sign of life"
        )
        self.kv_exports = self._counter(
            "kv_exports", "Prompts and paths that were asked for: a handle, or why not", "outcome"
        )
        self.kv_sent_bytes = self._counter("kv_sent_bytes", "Bytes of prompt KV sent over HTTP")
        self.kv_transfers_ended = self._counter(
            "kv_transfers_ended", "Downloads of prompt KV by how they ended", "outcome"
        )
        self.kv_bytes = Gauge(
            "coppice_kv_bytes", "Bytes of the arena", ["state"], registry=self.registry
        )
        self.kv_handles = self._gauge("kv_handles", "Handles whose lease runs or is to begin")
        self.kv_transfers = self._gauge("kv_transfers", "Downloads under way, waiting, or not read")
        self.kv_transfers_limit = self._gauge(
            "kv_transfers_limit", "Downloads that are sent at a time"
        )
        self.reuse = KvReuseMetrics(self.registry)
        self.lag_seconds = Histogram(
            "coppice_event_loop_lag_seconds",
            "How much later than asked the event loop comes back",
            buckets=LAG_BUCKETS,
            registry=self.registry,
        )
        self.shared_prefix_steps = self._counter(
            "shared_prefix_steps", "Steps whose attention read shared prefixes once"
        )
        self.shared_prefix_rows = self._counter(
            "shared_prefix_rows", "Samples in those steps that shared a prefix"
        )
        self.shared_prefix_bytes = self._counter(
            "shared_prefix_bytes_not_read", "Bytes of cache that those steps did not read again"
        )
        self.shared_prefix_skipped = self._counter(
            "shared_prefix_steps_skipped", "Steps left to stock attention by why", "reason"
        )
        self._shared_prefix = SharedPrefixStats()
        self.speculation = SpeculationMetrics(self.registry)
        self.drafter = DrafterMetrics(self.registry)
        self.directory_up = self._gauge("directory_up", "1 while the directory answers")
        self.directory_settled = self._gauge(
            "directory_settled", "1 while it is known who is gone, and not only who is there"
        )
        self.directory_contact_age = self._gauge(
            "directory_contact_age_seconds", "Time since the directory was last heard"
        )
        self.directory_replicas = self._gauge(
            "directory_replicas", "Replicas that the directory last named"
        )
        self.directory_failures = self._counter(
            "directory_failures", "Calls of the directory without an answer", "operation"
        )
        self.directory_redirects = self._counter(
            "directory_redirects", "Requests sent to the replica that has what they ask for"
        )
        self.directory_unshared = self._counter(
            "directory_unshared_keys", "Idempotency keys that other replicas could not be asked for"
        )
        self.graphs = self._gauge("graphs", "CUDA graphs captured, all of them planned")
        self.graph_bytes = Gauge(
            "coppice_graph_bytes",
            "Bytes of CUDA graphs on a rank",
            ["kind"],
            registry=self.registry,
        )
        self.graph_steps = self._counter(
            "graph_steps", "Steps by whether a planned graph decoded them", "outcome"
        )
        self.graph_misses = self._counter(
            "graph_misses",
            "Decode steps without a planned graph, by their shape",
            "samples",
            "tokens",
        )
        self._graphs = CudaGraphStats()
        self.build = Gauge("coppice_build_info", "Always 1", ["version"], registry=self.registry)
        self._init_labels()

    def record_group(self, group: GroupAnswer, sample_seconds: Sequence[float]) -> None:
        """Record a finished group.

        `sample_seconds`: the duration of each sample, in order of completion.
        """
        self.group_seconds.observe(max(sample_seconds, default=0.0))
        if len(sample_seconds) > 1 and (median := statistics.median(sample_seconds)) > 0:
            self.straggler_ratio.observe(max(sample_seconds) / median)
        self.groups.labels(group.outcome).inc()
        self.prompt_tokens.inc(group.num_prompt_tokens)
        self.prompt_tokens_cached.inc(group.num_cached_tokens)
        for part in (group, *(group.segments or ())):
            if part.kv is not None or part.kv_reason is not None:
                self.kv_exports.labels(part.kv_reason or "handle").inc()
        if group.reuse is not None:
            self.reuse.count_group(group.reuse)
        self.completion_tokens.inc(group.num_completion_tokens)
        if group.segments is None:
            for reason, number in TallyCounter(s.finish_reason for s in group.samples).items():
                self.samples.labels(reason).inc(number)
            spans = [sample.versions for sample in group.samples if len(sample.versions) > 1]
            self.samples_stale.inc(sum(len({s.version for s in each}) > 1 for each in spans))
        for segment in group.segments or ():
            self.segments.labels(segment.finish_reason).inc()

    def update_replication(self, weights: ReplicationStatus) -> None:
        self.weights_skew.set(weights.skew())
        self.weights_behind.set(weights.num_behind())
        self.weights_failed.set(weights.num_failed())

    def record_activation(self, answer: ActivationAnswer) -> None:
        self.activations.labels(answer.mode).inc()
        self.paused_seconds.observe(answer.paused_seconds)

    def record_upload(self, received_bytes: int, num_bytes: int) -> None:
        self.weights_received_bytes.inc(received_bytes)
        self.weights_spared_bytes.inc(max(0, num_bytes - received_bytes))

    def update_kv(self, status: KvStatus) -> None:
        for state in ("free", "reserved", "leased", "quarantined"):
            self.kv_bytes.labels(state).set(getattr(status, f"{state}_bytes"))
        self.kv_handles.set(status.handles)

    def update_cluster(self, fleet: ClusterMembership) -> None:
        self.directory_up.set(not fleet.unavailable)
        self.directory_settled.set(fleet.is_settled)
        self.directory_contact_age.set(fleet.contact_age_seconds)
        self.directory_replicas.set(len(fleet.view.replicas))

    def update_attention(self, counts: SharedPrefixStats) -> None:
        """Add the engine's cumulative counts since the last update."""
        previous, self._shared_prefix = self._shared_prefix, counts
        self.shared_prefix_steps.inc(counts.steps_grouped - previous.steps_grouped)
        self.shared_prefix_rows.inc(counts.rows_grouped - previous.rows_grouped)
        num_bytes = counts.prefix_bytes_not_read - previous.prefix_bytes_not_read
        self.shared_prefix_bytes.inc(num_bytes)
        for reason, number in counts.steps_skipped.items():
            more = number - previous.steps_skipped.get(reason, 0)
            self.shared_prefix_skipped.labels(reason).inc(more)

    def update_graphs(self, counts: CudaGraphStats) -> None:
        """Add the engine's cumulative counts since the last update, and set the gauges."""
        previous, self._graphs = self._graphs, counts
        self.graphs.set(counts.num_graphs)
        self.graph_bytes.labels("budget").set(counts.budget_bytes)
        self.graph_bytes.labels("estimated").set(counts.estimated_bytes)
        self.graph_bytes.labels("measured").set(counts.measured_bytes)
        self.graph_steps.labels("hit").inc(counts.hits - previous.hits)
        self.graph_steps.labels("mixed").inc(counts.mixed - previous.mixed)
        for (samples, tokens), steps in counts.misses.items():
            more = steps - previous.misses.get((samples, tokens), 0)
            self.graph_steps.labels("miss").inc(more)
            self.graph_misses.labels(str(samples), str(tokens) if tokens else "uneven").inc(more)

    def render(self) -> bytes:
        return generate_latest(REGISTRY) + generate_latest(self.registry)

    def _init_labels(self) -> None:
        self.build.labels(__version__).set(1)
        for code in PROBLEMS:
            self.problems.labels(code)
        for outcome in get_args(Outcome):
            self.groups.labels(outcome)
        for reason in get_args(FinishReason):
            self.samples.labels(reason)
        for kv_outcome in ("handle", *get_args(KvReason)):
            self.kv_exports.labels(kv_outcome)
        for transfer_outcome in get_args(TransferOutcome):
            self.kv_transfers_ended.labels(transfer_outcome)
        for finish in get_args(SegmentFinish):
            self.segments.labels(finish)
        for kind in ("dropped", "unknown"):
            self.compat_fields.labels(kind)
        for mode in get_args(ActivationMode):
            self.activations.labels(mode)
        for operation in DIRECTORY_OPERATIONS:
            self.directory_failures.labels(operation)
        for kind in ("budget", "estimated", "measured"):
            self.graph_bytes.labels(kind)
        for used in ("hit", "miss", "mixed"):
            self.graph_steps.labels(used)
        for skipped in get_args(AttentionFallbackReason):
            self.shared_prefix_skipped.labels(skipped)
        for outcome in get_args(AdapterLoadOutcome):
            self.adapter_loads.labels(outcome)
        for way in get_args(FetchMethod):
            self.weights_pulls.labels(way)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"coppice_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"coppice_{name}", text, registry=self.registry)
