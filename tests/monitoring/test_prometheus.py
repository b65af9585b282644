"""A real Prometheus with this repository's rules, scraping a real server over HTTP."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from helm.panels import ROWS
from tests.fake_engine import FakeEngine
from tests.monitoring.tools import RULES
from tests.ports import free_port
from tests.serving import TLS
from tests.serving_thread import serving_in_thread
from tests.tools import tool

DEADLINE_SECONDS = 60
ROLLOUT = {
    "groups": [{"prompt": {"token_ids": [1, 2, 3]}, "n": 4}],
    "sampling": {"max_tokens": 8},
}


@contextmanager
def prometheus(tmp_path: Path, target: str) -> Iterator[str]:
    """Runs Prometheus; yields its address. The log goes to a file: a full pipe would block it."""
    config = {
        "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(rules) for rules in RULES],
        "scrape_configs": [{"job_name": "coppice", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        tool("prometheus"),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def query_prometheus(url: str, query: str) -> list[dict[str, Any]]:
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10, verify=TLS)
    except httpx.TransportError:
        return []
    if answer.status_code != 200:
        return []
    result: list[dict[str, Any]] = answer.json()["data"]["result"]
    return result


def awaited(url: str, query: str) -> list[dict[str, Any]]:
    """Returns as soon as the query has a result."""
    due = time.monotonic() + DEADLINE_SECONDS
    while not (found := query_prometheus(url, query)):
        assert time.monotonic() < due, query
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_prometheus_scrapes_a_server_and_evaluates_the_rules(tmp_path: Path) -> None:
    with (
        serving_in_thread(FakeEngine(), tmp_path) as url,
        prometheus(tmp_path, url.removeprefix("http://")) as watching,
    ):
        [ready] = awaited(watching, 'coppice_ready{job="coppice"} == 1')
        assert ready["metric"]["instance"] == url.removeprefix("http://")
        httpx.post(f"{url}/v1/rollouts", content=json.dumps(ROLLOUT)).raise_for_status()
        [groups] = awaited(watching, 'coppice_groups_total{outcome="done"} > 0')
        assert groups["value"][1] == "1"
        awaited(watching, "job:coppice_completion_tokens:rate5m > 0")
        [full] = awaited(watching, "job:coppice_samples_admitted:ratio")
        assert full["value"][1] == "0"
        assert query_prometheus(watching, 'ALERTS{alertstate="firing"}') == []
        rules = httpx.get(f"{watching}/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}


@pytest.mark.slow
def test_prometheus_evaluates_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """With the variables of Grafana replaced as Grafana does."""
    with (
        serving_in_thread(FakeEngine(), tmp_path) as url,
        prometheus(tmp_path, url.removeprefix("http://")) as watching,
    ):
        awaited(watching, "coppice_ready")
        for query in queries():
            asked = re.sub(r"\$(namespace|job|instance)", ".*", query)
            asked = asked.replace("$__rate_interval", "1m")
            answer = httpx.get(f"{watching}/api/v1/query", params={"query": asked}, verify=TLS)
            assert answer.status_code == 200, (query, answer.text)
        ready = ROWS["Overview"][0].queries[""]
        [value] = awaited(watching, re.sub(r"\$\w+", ".*", ready))
    assert value["value"][1] == "1"


def queries() -> list[str]:
    panels = [panel for members in ROWS.values() for panel in members]
    return [query for panel in panels for query in panel.queries.values()]
