"""Alert rules, recording rules and the dashboard against the metrics that exist."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import yaml

from helm import dashboard
from service.observability.metrics import Metrics
from tests.monitoring.series import (
    OF_TARGETS,
    labels_of,
    names,
    own_series,
    selectors,
    vllms_series,
)
from tests.monitoring.tools import MONITORING, RULES, promtool
from tests.tools import ROOT

pytestmark = pytest.mark.slow
OF_THE_PROCESS = {"process_start_time_seconds", "process_resident_memory_bytes", "up"}


def rules() -> Iterator[dict[str, Any]]:
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from group["rules"]


def queries() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in all_panels():
        for target in panel.get("targets", []):
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"]


def all_panels() -> Iterator[dict[str, Any]]:
    """Rows and panels of the dashboard, those in collapsed rows included."""
    for panel in json.loads(dashboard.FILE.read_text())["panels"]:
        yield panel
        yield from panel.get("panels", [])


QUERIES = [pytest.param(expr, id=name) for name, expr in queries()]


@pytest.mark.parametrize("query", QUERIES)
def test_query_names_only_existing_series(query: str) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known = own_series().keys() | vllms_series() | recorded | OF_THE_PROCESS
    assert names(query) <= known


@pytest.mark.parametrize("query", QUERIES)
def test_every_series_is_restricted_to_a_release(query: str) -> None:
    """Otherwise an alert in one namespace fires for another's release."""
    narrowed = list(selectors(query))
    assert {s.name for s in narrowed} == names(query)
    for selector in narrowed:
        assert {"job", "namespace"} & {label for label, _, _ in selector.matchers}


@pytest.mark.parametrize("query", QUERIES)
def test_query_uses_only_existing_labels_and_values(query: str) -> None:
    series = own_series()
    for selector in selectors(query):
        if selector.name not in series:
            continue
        labels = labels_of(series[selector.name])
        for label, operator, value in selector.matchers:
            if label in OF_TARGETS:
                continue
            wanted = value.split("|") if operator == "=~" else [value]
            assert label in labels, (selector.name, label)
            assert not labels[label] or set(wanted) <= labels[label], (label, value)


def test_label_is_grouped_by_only_where_a_series_has_it() -> None:
    for _, query in queries():
        known = OF_TARGETS.union(
            *(labels_of(own_series()[n]) for n in names(query) & own_series().keys())
        )
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert {label.strip() for label in group.split(",")} <= known, query


def test_metrics_follow_the_prometheus_naming_rules() -> None:
    metrics = Metrics()
    metrics.http.requests.labels("/v1/rollouts", "200").inc()
    text = "".join(
        line + "\n"
        for line in metrics.render().decode().splitlines()
        if line.startswith(("coppice_", "# HELP coppice_", "# TYPE coppice_"))
        and not re.search(r"_created[ {]", line)
    )
    assert "coppice_requests_total" in text
    checked = promtool("check", "metrics", stdin=text)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_dashboard_is_generated_from_its_table() -> None:
    assert dashboard.FILE.read_text() == dashboard.render(), "python -m helm.dashboard"


def cells(panels: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    places = [panel["gridPos"] for panel in panels]
    return [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]


def test_panels_have_unique_ids() -> None:
    ids = [panel["id"] for panel in all_panels()]
    assert len(set(ids)) == len(ids)


def test_panels_fill_the_grid_without_overlaps() -> None:
    """The visible ones, and those of each collapsed row once it is expanded."""
    visible = dashboard.dashboard()["panels"]
    for panels in (visible, *(row.get("panels", []) for row in visible)):
        taken = cells(panels)
        assert len(set(taken)) == len(taken)
        assert all(0 <= x < dashboard.COLUMNS for x, _ in taken)


def test_overview_and_trainer_rows_are_open_and_come_first() -> None:
    rows = [panel for panel in all_panels() if panel["type"] == "row"]
    assert [row["title"] for row in rows][:2] == ["Overview", "Trainer"]
    assert [row["collapsed"] for row in rows] == [False] * 2 + [True] * (len(rows) - 2)
    visible = [panel for panel in dashboard.dashboard()["panels"] if panel["type"] != "row"]
    assert {panel["type"] for panel in visible[:12]} == {"stat"}


def test_every_panel_has_a_unit_and_a_description() -> None:
    for panel in all_panels():
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"] not in ("", "short"), panel["title"]


def test_panel_titles_are_unique() -> None:
    titles = [panel["title"] for panel in all_panels()]
    assert len(set(titles)) == len(titles)


def test_every_alert_has_severity_summary_and_runbook_page() -> None:
    runbook = (ROOT / "docs" / "operate" / "runbook.md").read_text()
    alerts = [rule for rule in rules() if "alert" in rule]
    for alert in alerts:
        labels, annotations = alert["labels"], alert["annotations"]
        assert labels["severity"] in ("critical", "warning")
        assert annotations["summary"]
        assert annotations["runbook_url"] == f"docs/operate/runbook.md#{alert['alert'].lower()}"
    headings = set(re.findall(r"^## (Coppice\w+)$", runbook, re.MULTILINE))
    assert headings == {alert["alert"] for alert in alerts}


def test_promtool_accepts_the_rules() -> None:
    checked = promtool("check", "rules", *(MONITORING / file.name for file in RULES))
    assert checked.returncode == 0, checked.stderr
