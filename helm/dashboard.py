"""Generator of the Grafana dashboard from helm/panels.py. Run `python -m helm.dashboard`."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from helm.panel import RELEASE, Panel
from helm.panels import ROWS

FILE = Path(__file__).parent / "coppice" / "monitoring" / "dashboard.json"
COLUMNS = 24
SIZES = {"stat": (4, 4), "timeseries": (8, 7)}  # width and height in Grafana's grid
EXPANDED = ("Overview", "Trainer")
STAT_OPTIONS = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "area",
    "textMode": "value",
}
SERIES_OPTIONS = {
    "legend": {"displayMode": "list", "placement": "bottom"},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def dashboard() -> dict[str, Any]:
    return {
        "uid": "coppice",
        "title": "Coppice",
        "tags": ["coppice"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    return [
        {**source, "query": "prometheus"},
        _template_variable("namespace", "label_values(coppice_build_info, namespace)"),
        _template_variable("job", 'label_values(coppice_build_info{namespace=~"$namespace"}, job)'),
        _template_variable("instance", f"label_values(coppice_build_info{{{RELEASE}}}, instance)"),
    ]


def _template_variable(name: str, query: str) -> dict[str, Any]:
    """A template variable.

    `allValue` is `.*`, not `.+`: Prometheus outside Kubernetes has no namespace.
    """
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> list[dict[str, Any]]:
    """Rows with their panels. Grafana nests the panels of collapsed rows in the row itself."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in ROWS.items():
        collapsed = title not in EXPANDED
        below = _places(members, y + 1)
        panels.append(_row(title, y, below if collapsed else []))
        y += 1
        if not collapsed:
            panels += below
            y = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in below)
    numbers = count(1)
    return [_numbered(panel, numbers) for panel in panels]


def _numbered(panel: dict[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    nested = {"panels": [_numbered(below, numbers) for below in panel.get("panels", [])]}
    return {"id": next(numbers), **panel, **(nested if panel["type"] == "row" else {})}


def _places(members: list[Panel], top: int) -> list[dict[str, Any]]:
    """Panels in a grid: six stats or three time series per line."""
    width, height = SIZES[members[0].kind]
    per_line = COLUMNS // width
    return [
        _panel(
            panel,
            {
                "x": width * (index % per_line),
                "y": top + height * (index // per_line),
                "w": width,
                "h": height,
            },
        )
        for index, panel in enumerate(members)
    ]


def _row(title: str, y: int, panels: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "row",
        "title": title,
        "collapsed": bool(panels),
        "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        "panels": panels,
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    is_stat = panel.kind == "stat"
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if is_stat:
        defaults |= {"thresholds": _thresholds(panel), "color": {"mode": "thresholds"}}
    else:
        defaults["custom"] = {"fillOpacity": 8, "showPoints": "never"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": STAT_OPTIONS if is_stat else SERIES_OPTIONS,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expr, "legendFormat": name}
            for i, (name, expr) in enumerate(panel.queries.items())
        ],
    }


def _thresholds(panel: Panel) -> dict[str, Any]:
    colours = ["orange", "red"] if len(panel.thresholds) == 2 else ["red"]
    steps: list[dict[str, Any]] = [
        {"color": "text" if not panel.thresholds else "green", "value": None}
    ]
    steps += [{"color": c, "value": v} for c, v in zip(colours, panel.thresholds, strict=False)]
    return {"mode": "absolute", "steps": steps}


def render() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
