"""Generator of the metrics, from the metric tables, with the alerts that use each metric."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from prometheus_client import Metric

from service.observability.engine_metrics import (
    AttentionMetrics,
    DrafterMetrics,
    GraphMetrics,
    KeptKvMetrics,
    SessionKvMetrics,
    SpeculationMetrics,
)
from service.observability.kv_metrics import KvReuseMetrics, PromptKvMetrics
from service.observability.metric_declaration import MetricTable
from service.observability.metrics import (
    ClusterMetrics,
    HttpMetrics,
    Metrics,
    RolloutMetrics,
    ServerMetrics,
    WeightMetrics,
)
from service.observability.session_metrics import SessionMetrics

RULES = Path(__file__).parents[2] / "helm" / "coppice" / "monitoring"
RUNBOOK = "../operate/runbook.md"
SUFFIXES = {"counter": "_total"}
UNITS = ("seconds", "bytes", "ratio", "tokens")
TITLES: dict[type[MetricTable], str] = {
    ServerMetrics: "Server",
    HttpMetrics: "Connections and requests",
    RolloutMetrics: "Rollouts",
    WeightMetrics: "Weights and adapters",
    PromptKvMetrics: "Prompt KV",
    KvReuseMetrics: "KV reuse",
    SessionMetrics: "Agent sessions",
    SessionKvMetrics: "Retained KV of agent sessions",
    ClusterMetrics: "Cluster",
    AttentionMetrics: "Shared-prefix attention",
    KeptKvMetrics: "KV across weights updates",
    GraphMetrics: "CUDA graphs",
    SpeculationMetrics: "Speculative decoding",
    DrafterMetrics: "Drafter",
}
MANY = 20  # values of a label that a table does not list


def lines() -> Iterator[str]:
    for table in vars(Metrics()).values():
        if isinstance(table, MetricTable):
            yield from _table(table)


def _table(table: MetricTable) -> Iterator[str]:
    heading, _, rest = (type(table).__doc__ or "").removeprefix("Metrics of ").partition("\n\n")
    yield from (f"## {TITLES[type(table)]}", "", heading[:1].upper() + heading[1:], "")
    yield from (" ".join(rest.split()), "")
    yield "| metric | type | meaning | labels | alerts |"
    yield "|---|---|---|---|---|"
    for collector in table.collectors.values():
        yield _row(next(iter(collector.collect())), tuple(collector._labelnames))
    yield ""


def _row(family: Metric, labels: Iterable[str]) -> str:
    name = family.name + SUFFIXES.get(family.type, "")
    values = "<br>".join(_label(family, label) for label in labels) or "-"
    unit = next((word for word in UNITS if word in family.name.split("_")), None)
    kind = f"{family.type}, {unit}" if unit else family.type
    alerts = ", ".join(f"[{alert}]({RUNBOOK}#{alert.lower()})" for alert in _alerts(name)) or "-"
    return f"| `{name}` | {kind} | {family.documentation} | {values} | {alerts} |"


def _label(family: Metric, label: str) -> str:
    """The label with the values that exist from the start, if these are all its values."""
    values = list(dict.fromkeys(s.labels[label] for s in family.samples if label in s.labels))
    listed = ", ".join(f"`{value}`" for value in values)
    fixed = 0 < len(values) <= MANY and label != "version"
    return f"`{label}`: {listed}" if fixed else f"`{label}`"


def _alerts(name: str) -> Iterator[str]:
    series = re.compile(rf"\b{name}(_bucket|_sum|_count)?\b")
    for alert, expression in _rules().items():
        if series.search(expression):
            yield alert


def _rules() -> dict[str, str]:
    """Expressions of the alerts, in which the recorded series are replaced by their expressions."""
    groups = [
        group
        for file in sorted(RULES.glob("*.yaml"))
        for group in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("groups", ())
    ]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    return {rule["alert"]: _expanded(rule["expr"], recorded) for rule in rules if "alert" in rule}


def _expanded(expression: str, recorded: dict[str, str]) -> str:
    used = [text for name, text in recorded.items() if name in expression]
    return " ".join([expression, *used])
