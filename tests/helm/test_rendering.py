"""Every values file: lint, render, and validation for three versions of Kubernetes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest

from helm import golden, readme, schema
from helm.golden import CHART
from tests.helm.chart import FILES, WITH_KEYS, Object, objects, one, settings, values_of

pytestmark = pytest.mark.slow
VERSIONS = ("1.29", "1.31", "1.34")


# Required paths of custom resource kinds, for which Kubernetes has no schema.
CUSTOM = {
    "ServiceMonitor": ("spec.selector.matchLabels", "spec.endpoints"),
    "PrometheusRule": ("spec.groups",),
    "InferencePool": (
        "spec.targetPorts",
        "spec.selector.matchLabels",
        "spec.endpointPickerRef.port.number",
    ),
    "HTTPRoute": ("spec.parentRefs", "spec.rules"),
    "LeaderWorkerSet": (
        "spec.rolloutStrategy.rollingUpdateConfiguration",
        "spec.leaderWorkerTemplate.size",
        "spec.leaderWorkerTemplate.workerTemplate.spec.containers",
    ),
    "ScaledObject": ("spec.scaleTargetRef.name", "spec.triggers", "spec.fallback.replicas"),
}
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[name]
    return tree


@cache
def assert_rendered(text: str, version: str) -> None:
    """Validates an object.

    Cached: many files have the same Service, and a validation takes long.
    """
    kubernetes_validate.validate(json.loads(text), version, strict=True)


@every_file
def test_lint_finds_nothing(file: Path) -> None:
    found = helm_python.lint(str(CHART), values_of(file), strict=True)
    # The only finding of severity 1 (info) is the missing icon.
    assert [message for message in found["messages"] if message["severity"] > 1] == []


@every_file
def test_kubernetes_accepts_every_object(file: Path) -> None:
    for found in objects(values_of(file)):
        if found["kind"] in CUSTOM:
            assert all(at(found, path) for path in CUSTOM[found["kind"]])
            continue
        for version in VERSIONS:
            assert_rendered(json.dumps(found), version)


@pytest.mark.parametrize(
    "file", [file for file in FILES if "two-nodes" in file.stem], ids=lambda file: file.stem
)
def test_kubernetes_accepts_the_pods_of_a_group(file: Path) -> None:
    group = one("LeaderWorkerSet", values_of(file))
    template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"]["name"] = "one"
    for version in VERSIONS:
        assert_rendered(json.dumps(pod), version)


def test_validation_detects_a_misspelt_field() -> None:
    [deployment] = [o for o in objects(values_of(FILES[0])) if o["kind"] == "Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["livenesProbe"] = container.pop("livenessProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


@pytest.mark.parametrize("example", golden.EXAMPLES, ids=lambda example: example.stem)
def test_renders_of_the_examples_equal_the_reviewed_ones(example: Path) -> None:
    assert golden.golden(example).read_text() == golden.render(example), "make chart"


def test_readme_and_schema_are_generated() -> None:
    assert readme.FILE.read_text() == readme.render(), "make chart"
    assert schema.FILE.read_text() == schema.render(), "make chart"


def test_helm_does_not_ignore_the_schema() -> None:
    """A known mistake: a chart whose .helmignore excludes its schema never loads it."""
    assert "schema" not in (CHART / ".helmignore").read_text()


def test_without_keys_the_service_names_are_answered() -> None:
    values: Object = {"auth": {"allowOpen": True, "allowedHosts": ["rollouts.example"]}}
    render = settings(values)["server"]
    assert render["allowed_hosts"] == [
        *("rl-coppice", "rl-coppice.rl", "rl-coppice.rl.svc", "rl-coppice.rl.svc.cluster.local"),
        "rollouts.example",
    ]
    assert "allowed_hosts" not in settings(WITH_KEYS)["server"]


def test_runbook_address_is_configurable() -> None:
    address = "https://docs.example/operate/runbook/"
    values: Object = {**WITH_KEYS, "prometheusRule": {"enabled": True, "runbookUrl": address}}
    groups = one("PrometheusRule", values)["spec"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 20
    for alert in alerts:
        assert alert["annotations"]["runbook_url"] == f"{address}#{alert['alert'].lower()}"
