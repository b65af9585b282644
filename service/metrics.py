"""The service's own metrics, prefix coppice_, beside vLLM's in the default registry.

Label values come from fixed sets and start at zero, so that a rate over a rare event has a base.
docs/metrics.md is the table of them; dashboards and rules name nothing that is not there.
"""

import statistics
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
from coppice.wire.weights import ActivationMode
from engine.protocol import SharedPrefixCounts, SkipReason
from service import __version__

LAG_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
RATIOS = (1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30)


class Metrics:
    """One registry per service, so that several can live in one process."""

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
        self.samples_stale = self._counter(
            "samples_stale", "Samples with tokens of a version that was not active at their end"
        )
        self.compat_fields = self._counter(
            "compat_fields", "Fields of other servers' clients that were not used", "kind"
        )
        self.activations = self._counter("activations", "Weights activated", "mode")
        self.group_seconds = Histogram(
            "coppice_group_duration_seconds",
            "Time from a group's submission to its last sample",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.straggler_ratio = Histogram(
            "coppice_group_straggler_ratio",
            "Time of a group's last sample over that of its median one",
            buckets=RATIOS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "coppice_request_duration_seconds",
            "Time from a request's head to the end of its answer",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.paused_seconds = Histogram(
            "coppice_activation_paused_seconds",
            "Time that samples stood still for an activation",
            buckets=SECONDS,
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
            "kv_exports", "Groups that asked for prompt KV: a handle, or why not", "outcome"
        )
        self.kv_sent_bytes = self._counter("kv_sent_bytes", "Bytes of prompt KV sent over HTTP")
        self.kv_bytes = Gauge(
            "coppice_kv_bytes", "Bytes of the arena", ["state"], registry=self.registry
        )
        self.kv_handles = self._gauge("kv_handles", "Handles whose lease runs or is to begin")
        self.kv_transfers = self._gauge("kv_transfers", "Downloads under way or waiting")
        self.lag_seconds = Histogram(
            "coppice_event_loop_lag_seconds",
            "How much later than asked the event loop comes back",
            buckets=LAG_SECONDS,
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
        self._shared_prefix = SharedPrefixCounts()
        self.build = Gauge("coppice_build_info", "Always 1", ["version"], registry=self.registry)
        self._begin_at_zero()

    def group_ended(
        self, group: GroupAnswer, sample_seconds: Sequence[float], *, active_version: str
    ) -> None:
        """`sample_seconds`: how long each sample took, in the order in which they ended."""
        self.group_seconds.observe(max(sample_seconds, default=0.0))
        if len(sample_seconds) > 1 and (median := statistics.median(sample_seconds)) > 0:
            self.straggler_ratio.observe(max(sample_seconds) / median)
        self.groups.labels(group.outcome).inc()
        self.prompt_tokens.inc(group.num_prompt_tokens)
        self.prompt_tokens_cached.inc(group.num_cached_tokens)
        if group.kv is not None or group.kv_reason is not None:
            self.kv_exports.labels(group.kv_reason or "handle").inc()
        self.completion_tokens.inc(group.num_completion_tokens)
        if group.segments is None:
            for sample in group.samples:
                self.samples.labels(sample.finish_reason).inc()
        for segment in group.segments or ():
            self.segments.labels(segment.finish_reason).inc()
        for part in group.segments or group.samples:
            stale = any(span.version != active_version for span in part.versions)
            self.samples_stale.inc(stale)

    def kv_observed(self, status: KvStatus) -> None:
        for state in ("free", "reserved", "leased", "quarantined"):
            self.kv_bytes.labels(state).set(getattr(status, f"{state}_bytes"))
        self.kv_handles.set(status.handles)

    def attention_counted(self, counts: SharedPrefixCounts) -> None:
        """The engine counts; what it has counted since it was last asked is added here."""
        before, self._shared_prefix = self._shared_prefix, counts
        self.shared_prefix_steps.inc(counts.steps_grouped - before.steps_grouped)
        self.shared_prefix_rows.inc(counts.rows_grouped - before.rows_grouped)
        num_bytes = counts.prefix_bytes_not_read - before.prefix_bytes_not_read
        self.shared_prefix_bytes.inc(num_bytes)
        for reason, number in counts.steps_skipped.items():
            more = number - before.steps_skipped.get(reason, 0)
            self.shared_prefix_skipped.labels(reason).inc(more)

    def render(self) -> bytes:
        return generate_latest(REGISTRY) + generate_latest(self.registry)

    def _begin_at_zero(self) -> None:
        self.build.labels(__version__).set(1)
        for code in PROBLEMS:
            self.problems.labels(code)
        for outcome in get_args(Outcome):
            self.groups.labels(outcome)
        for reason in get_args(FinishReason):
            self.samples.labels(reason)
        for kv_outcome in ("handle", *get_args(KvReason)):
            self.kv_exports.labels(kv_outcome)
        for finish in get_args(SegmentFinish):
            self.segments.labels(finish)
        for kind in ("dropped", "unknown"):
            self.compat_fields.labels(kind)
        for mode in get_args(ActivationMode):
            self.activations.labels(mode)
        for skipped in get_args(SkipReason):
            self.shared_prefix_skipped.labels(skipped)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"coppice_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"coppice_{name}", text, registry=self.registry)
