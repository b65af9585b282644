"""Numbers of the benchmark records, and charts that are drawn from them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib.figure import Figure

from bench.harness.record import RECORDS
from bench.report.drawing import Ratio, parse_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture and its explanation. `records` are the records that it is drawn from."""

    name: str
    title: str
    records: tuple[str, ...]
    draw: Callable[[], Figure]
    text: Callable[[], str]


def chart(draw: Callable[[], Figure], text: Callable[[], str], title: str, *records: str) -> Chart:
    return Chart(
        name=draw.__name__.replace("_", "-"), title=title, records=records, draw=draw, text=text
    )


@cache
def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return found


def cell(name: str, what: str) -> str:
    """The measured value in the row of a record that starts with `what`."""
    return next(str(r["value"]) for r in record(name)["rows"] if r["what"].startswith(what))


def has_row(name: str, what: str) -> bool:
    return any(row["what"].startswith(what) for row in record(name)["rows"])


def number(name: str, what: str, before: str = "") -> float:
    """The first number of a cell, or the first one after the words `before`."""
    found = re.search(re.escape(before) + r"\D*?(-?[\d,]+\.?\d*)", cell(name, what))
    assert found, (name, what, before)
    return float(found[1].replace(",", ""))


def ratio(name: str, what: str, label: str, baseline: str = "", *, ceiling: str = "") -> Ratio:
    median, low, high = parse_ratio(cell(name, what))
    limit = number(name, what, ceiling) if ceiling else None
    return Ratio(label=label, baseline=baseline, median=median, low=low, high=high, ceiling=limit)


def median(name: str, what: str) -> str:
    return f"{parse_ratio(cell(name, what))[0]:.2f}x"
