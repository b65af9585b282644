"""Generator of the Grafana dashboard from helm/panels.py. Run `python -m helm.dashboard`."""

import json
from pathlib import Path
from typing import Any

from helm.panel import Panel
from helm.panels import ROWS

FILE = Path(__file__).parent / "coppice" / "monitoring" / "dashboard.json"
WIDTH, HEIGHT, PER_ROW = 8, 7, 3


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
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in ROWS.items():
        panels.append(_row(row, y))
        y += 1
        for index, panel in enumerate(members):
            place = {
                "x": WIDTH * (index % PER_ROW),
                "y": y + HEIGHT * (index // PER_ROW),
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append(_panel(panel, place))
        y += HEIGHT * -(-len(members) // PER_ROW)
    return [{"id": number, **panel} for number, panel in enumerate(panels, start=1)]


def _row(title: str, y: int) -> dict[str, Any]:
    return {
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        "panels": [],
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expr, "legendFormat": name}
            for i, (name, expr) in enumerate(panel.queries.items())
        ],
    }


def render() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
