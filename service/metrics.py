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

from coppice.wire.problems import PROBLEMS
from coppice.wire.rollouts import FinishReason, GroupAnswer, Outcome
from coppice.wire.weights import ActivationMode
from service import __version__

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
RATIOS = (1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30)


class Metrics:
    """One registry per service, so that several can live in one process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.groups = self._counter("groups", "Groups by how they ended", "outcome")
        self.samples = self._counter("samples", "Samples by how they ended", "finish_reason")
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
        for sample in group.samples:
            self.samples.labels(sample.finish_reason).inc()
            self.completion_tokens.inc(len(sample.token_ids))
            stale = any(span.version != active_version for span in sample.versions)
            self.samples_stale.inc(stale)

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
        for mode in get_args(ActivationMode):
            self.activations.labels(mode)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"coppice_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"coppice_{name}", text, registry=self.registry)
