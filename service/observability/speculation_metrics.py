"""Metrics of speculative decoding: drafts, acceptance and gain."""

from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.settings import MAX_DRAFT_TOKENS
from engine.stats import DraftScope, SpeculationDecision, SpeculationSkipReason, SpeculationStats

Label = TypeVar("Label")


class SpeculationMetrics:
    """Metrics updated from the engine's cumulative counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        scopes, lengths = get_args(DraftScope), range(1, MAX_DRAFT_TOKENS + 1)
        self._drafted = self._counter(
            "drafted_tokens", "Tokens drafted and verified, by whose text", "scope", scopes
        )
        self._accepted = self._counter(
            "accepted_tokens", "Those of them that were accepted", "scope", scopes
        )
        self._drafts = self._counter("drafts", "Drafts verified", "length", lengths)
        self._steps = self._counter(
            "steps", "Steps by what became of their drafts", "choice", get_args(SpeculationDecision)
        )
        self._skipped = self._counter(
            "skipped",
            "Samples, or steps that failed, without drafts",
            "reason",
            get_args(SpeculationSkipReason),
        )
        self._acceptance = self._gauge(
            "acceptance_ratio", "Accepted of the tokens drafted since the weights changed last"
        )
        self._gain = self._gauge(
            "gain_ratio",
            "Time that the last steps' tokens would have taken without drafts, over what they took",
        )
        self._cost_error = self._gauge(
            "cost_error_ratio", "How far off the predicted times of the last steps were"
        )
        self._bytes = self._gauge("store_bytes", "Bytes of the text that drafts are taken from")
        self._previous = SpeculationStats()
        self._gain.set(self._previous.gain_ratio)

    def update(self, counts: SpeculationStats) -> None:
        previous, self._previous = self._previous, counts
        _add(self._drafted, previous.drafted, counts.drafted)
        _add(self._accepted, previous.accepted, counts.accepted)
        _add(self._drafts, previous.drafts, counts.drafts)
        _add(self._steps, previous.steps, counts.steps)
        _add(self._skipped, previous.skipped, counts.skipped)
        self._acceptance.set(counts.version_accepted / max(counts.version_drafted, 1))
        self._gain.set(counts.gain_ratio)
        self._cost_error.set(counts.cost_error_ratio)
        self._bytes.set(counts.store_bytes)

    def _counter(self, name: str, text: str, label: str, values: Iterable[object]) -> Counter:
        counter = Counter(f"coppice_speculation_{name}", text, [label], registry=self._registry)
        for value in values:
            counter.labels(str(value))
        return counter

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"coppice_speculation_{name}", text, registry=self._registry)


def _add(counter: Counter, previous: Mapping[Label, int], now: Mapping[Label, int]) -> None:
    for label, number in now.items():
        counter.labels(str(label)).inc(number - previous.get(label, 0))
