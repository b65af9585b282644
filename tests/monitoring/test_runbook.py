"""The runbook: each alert has a section with four points, and the panels that it names exist."""

import re

import pytest
import yaml

from tests.monitoring.tools import MONITORING, RULES
from tests.tools import ROOT

RUNBOOK = (ROOT / "docs" / "operate" / "runbook.md").read_text()
POINTS = ["Symptom", "Meaning", "Check", "Do"]


def sections() -> dict[str, str]:
    parts = re.split(r"^## (\w+)\n", RUNBOOK, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_sections_are_the_alerts() -> None:
    [group] = yaml.safe_load(RULES[1].read_text())["groups"]
    found = [name for name in sections() if name.startswith("Coppice")]
    assert sorted(found) == sorted(rule["alert"] for rule in group["rules"])


@pytest.mark.parametrize("alert", [name for name in sections() if name.startswith("Coppice")])
def test_section_has_symptom_meaning_check_and_action(alert: str) -> None:
    assert re.findall(r"^- \*\*(\w+)\*\*: ", sections()[alert], re.MULTILINE) == POINTS


def test_panels_of_the_runbook_are_in_the_dashboard() -> None:
    dashboard = (MONITORING / "dashboard.json").read_text()
    named = re.findall(r'[Pp]anels? "([^"]+)"(?: and "([^"]+)")?', " ".join(RUNBOOK.split()))
    titles = {title for pair in named for title in pair if title}
    assert len(titles) > 4
    assert not {title for title in titles if f'"title": "{title}"' not in dashboard}
