"""A panel of the dashboard: what it shows, in which unit, and by which queries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: PromQL by legend; CHOSEN stands for the labels of the release."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]
