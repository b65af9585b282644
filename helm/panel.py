"""A dashboard panel, and PromQL that is restricted to the selected release."""

from dataclasses import dataclass

CHOSEN = 'namespace=~"$namespace",job=~"$job"'


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries` maps legends to PromQL."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]


def rate(series: str, by: str, matchers: str = "") -> str:
    chosen = f"{CHOSEN},{matchers}" if matchers else CHOSEN
    return f"sum by ({by}) (rate({series}{{{chosen}}}[$__rate_interval]))"


def level(series: str, by: str = "instance") -> str:
    return f"max by ({by}) ({series}{{{CHOSEN}}})"


def quantile(q: float, series: str) -> str:
    return f"histogram_quantile({q}, {rate(series + '_bucket', 'le')})"


def quantiles(series: str) -> dict[str, str]:
    return {"median": quantile(0.5, series), "95 %": quantile(0.95, series)}


def share(part: str, whole: str, matchers: str = "") -> str:
    return f"{rate(part, 'job', matchers)} / ({rate(whole, 'job')} > 0)"
