"""A dashboard panel: its title, unit and queries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries` maps legends to PromQL, in which CHOSEN stands for the release's labels."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]
