"""Series in a PromQL query, with the labels that each is filtered or grouped by.

Not a parser of PromQL: every series in this repository's queries is followed by its matchers in
braces, which a test checks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from prometheus_client import Metric

from service.observability.metrics import Metrics

OF_TARGETS = {"namespace", "job", "instance", "pod", "le"}
_NAME = re.compile(r"\b(?:coppice_|vllm:|job:|process_|up\b)[\w:]*")
_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)\{(?P<matchers>[^}]*)\}")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True)
class Selector:
    """One series with its matchers: label, operator and value."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(query: str) -> Iterator[Selector]:
    for found in _SELECTOR.finditer(query):
        matchers = _MATCHER.findall(found["matchers"])
        yield Selector(found["name"], tuple(matchers))


def names(query: str) -> set[str]:
    """Every series name, whether or not matchers follow it."""
    return set(_NAME.findall(query))


def families() -> dict[str, Metric]:
    return {family.name: family for family in Metrics().registry.collect()}


def own_series() -> dict[str, Metric]:
    """Every series of the server, by its name in queries."""
    return {
        name + suffix: family
        for name, family in families().items()
        for suffix in _SUFFIXES[family.type]
    }


def labels_of(family: Metric) -> dict[str, set[str]]:
    """The labels of a metric, with the values that exist from the start, if any."""
    return {
        name: {s.labels[name] for s in family.samples if name in s.labels}
        for name in label_names(family.name)
    }


def label_names(family: str) -> tuple[str, ...]:
    metrics = Metrics()
    collectors = metrics.registry._collector_to_names
    for collector, known in collectors.items():
        if family in known:
            return tuple(getattr(collector, "_labelnames", ()))
    raise AssertionError(family)


@cache
def vllms_series() -> set[str]:
    """Series names found in vLLM's source: importing vLLM for this would be slow."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    v1 = Path(spec.origin).parent / "v1"
    sources = [v1 / "metrics" / "loggers.py", v1 / "spec_decode" / "metrics.py"]
    written = {
        name for source in sources for name in re.findall(r'"(vllm:\w+)"', source.read_text())
    }
    return {name + suffix for name in written for suffix in ("", "_total", "_bucket")}
