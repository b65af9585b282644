"""The service's own metrics, prefix coppice_, beside vLLM's in the default registry.

Label values come from fixed sets and start at zero, so that a rate over a rare event has a base.
"""

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

from coppice.wire.rollouts import FinishReason, GroupAnswer, Outcome
from coppice.wire.weights import ActivationMode

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


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
        self.compat_fields = self._counter(
            "compat_fields", "Fields of other servers' clients that were not used", "kind"
        )
        self.activations = self._counter("activations", "Weights activated", "mode")
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
        self.weights_sequence = self._gauge("weights_sequence", "Sequence of the active version")
        self.engine_up = self._gauge("engine_up", "1 while the engine makes progress")
        self.heartbeat_age = self._gauge(
            "engine_heartbeat_age_seconds", "Time since the engine's last sign of life"
        )
        self._begin_at_zero()

    def group_ended(self, group: GroupAnswer) -> None:
        self.groups.labels(group.outcome).inc()
        self.prompt_tokens.inc(group.num_prompt_tokens)
        self.prompt_tokens_cached.inc(group.num_cached_tokens)
        for sample in group.samples:
            self.samples.labels(sample.finish_reason).inc()
            self.completion_tokens.inc(len(sample.token_ids))

    def render(self) -> bytes:
        return generate_latest(REGISTRY) + generate_latest(self.registry)

    def _begin_at_zero(self) -> None:
        for outcome in get_args(Outcome):
            self.groups.labels(outcome)
        for reason in get_args(FinishReason):
            self.samples.labels(reason)
        for kind in ("dropped", "unknown"):
            self.compat_fields.labels(kind)
        for mode in get_args(ActivationMode):
            self.activations.labels(mode)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"coppice_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"coppice_{name}", text, registry=self.registry)
