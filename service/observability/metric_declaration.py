"""Base class of metric tables: attributes declare Prometheus metrics and their labels.

A label is declared with its values. A metric with labels is exported as zero for each combination
of these values, so that `rate` is defined for rare events too. A label that is declared without
values accepts any value.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, Generic, Self, TypeVar, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

Collector = TypeVar("Collector", bound=MetricWrapperBase)
Values = Iterable[object]


class CumulativeCounter(Counter):
    """Prometheus counter that is updated from the cumulative total of a source like the engine."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._last_total = 0.0

    def update(self, total: float) -> None:
        """Raise the counter to the source's total, by the increase since the last update."""
        self.inc(total - self._last_total)
        self._last_total = total

    def update_all(self, totals: Mapping[Any, float]) -> None:
        """Update a counter with one label from a mapping of label values to totals."""
        for value, total in totals.items():
            self.labels(str(value)).update(total)


class Metric(Generic[Collector]):
    """Declaration of a metric; on a MetricTable instance it reads as the registered collector."""

    def __init__(self, register: Callable[[CollectorRegistry], Collector]) -> None:
        self.register = register

    @overload
    def __get__(self, table: None, owner: type) -> Self: ...
    @overload
    def __get__(self, table: "MetricTable", owner: type) -> Collector: ...
    def __get__(self, table: "MetricTable | None", owner: type) -> Self | Collector:
        return self if table is None else table.collectors[self]


class MetricTable:
    """Base class for the Prometheus metrics of a subsystem, declared as Metric attributes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.collectors: dict[Metric[Any], Any] = {
            metric: metric.register(registry)
            for metric in vars(type(self)).values()
            if isinstance(metric, Metric)
        }


def counter(name: str, text: str, **labels: Values) -> Metric[Counter]:
    return _declare(Counter, name, text, labels)


def cumulative_counter(name: str, text: str, **labels: Values) -> Metric[CumulativeCounter]:
    return _declare(CumulativeCounter, name, text, labels)


def gauge(name: str, text: str, **labels: Values) -> Metric[Gauge]:
    return _declare(Gauge, name, text, labels)


def histogram(
    name: str, text: str, buckets: tuple[float, ...], **labels: Values
) -> Metric[Histogram]:
    return _declare(Histogram, name, text, labels, buckets=buckets)


def _declare(
    collector: type[Collector], name: str, text: str, labels: Mapping[str, Values], **options: Any
) -> Metric[Collector]:
    combinations = [tuple(map(str, values)) for values in product(*labels.values())]

    def register(registry: CollectorRegistry) -> Collector:
        metric = collector(f"coppice_{name}", text, tuple(labels), registry=registry, **options)
        for values in combinations if labels else ():
            metric.labels(*values)
        return metric

    return Metric(register)
