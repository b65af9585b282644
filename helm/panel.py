"""A dashboard panel, and PromQL that is restricted to the selected release."""

from dataclasses import dataclass, field
from typing import Literal

RELEASE = 'namespace=~"$namespace",job=~"$job"'
CHOSEN = f'{RELEASE},instance=~"$instance"'


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries` maps legends to PromQL.

    A `stat` shows the latest value. `thresholds` are the values from which it is orange and red.
    """

    title: str
    unit: str
    description: str
    queries: dict[str, str]
    kind: Literal["timeseries", "stat"] = "timeseries"
    thresholds: tuple[float, ...] = field(default=())


def stat(
    title: str, unit: str, description: str, query: str, thresholds: tuple[float, ...] = ()
) -> Panel:
    return Panel(title, unit, description, {"": query}, "stat", thresholds)


def rate(series: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) ({_rate(series, matchers)})"


def total_rate(series: str, matchers: str = "") -> str:
    return f"sum({_rate(series, matchers)})"


def _rate(series: str, matchers: str) -> str:
    chosen = f"{CHOSEN},{matchers}" if matchers else CHOSEN
    return f"rate({series}{{{chosen}}}[$__rate_interval])"


def level(series: str, by: str = "instance") -> str:
    return f"max by ({by}) ({series}{{{CHOSEN}}})"


def total(series: str) -> str:
    return f"sum({series}{{{CHOSEN}}})"


def highest(series: str) -> str:
    return f"max({series}{{{CHOSEN}}})"


def quantile(q: float, series: str, by: str = "le", matchers: str = "") -> str:
    return f"histogram_quantile({q}, {rate(series + '_bucket', by, matchers)})"


def quantiles(series: str) -> dict[str, str]:
    return {"median": quantile(0.5, series), "95 %": quantile(0.95, series)}


def share(part: str, whole: str, matchers: str = "") -> str:
    return f"{rate(part, 'job', matchers)} / ({rate(whole, 'job')} > 0)"
