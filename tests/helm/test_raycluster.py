"""The manifest for KubeRay, whose controller does not run here."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from helm.golden import HERE
from service.config.settings import Settings
from service.config.sources import load_settings
from tests.helm.test_rendering import VERSIONS

pytestmark = pytest.mark.slow
CLUSTER, CONFIG_MAP, SERVICE, POLICY = list(
    yaml.safe_load_all((HERE / "raycluster.yaml").read_text())
)
HEAD: Any = CLUSTER["spec"]["headGroupSpec"]
(WORKERS,) = CLUSTER["spec"]["workerGroupSpecs"]
NODES = (HEAD, WORKERS)


def container(node: Any) -> Any:
    (found,) = node["template"]["spec"]["containers"]
    return found


def chart_values() -> Any:
    return yaml.safe_load((HERE / "coppice" / "values.yaml").read_text())


def settings(folder: Path) -> Settings:
    file = folder / "settings.yaml"
    file.write_text(CONFIG_MAP["data"]["settings.yaml"])
    return load_settings(environ={}, file=file)


def test_kubernetes_accepts_the_pods_and_the_other_objects() -> None:
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **node["template"]}
        for node in NODES
    ]
    for version in VERSIONS:
        for found in (*pods, CONFIG_MAP, SERVICE, POLICY):
            kubernetes_validate.validate(found, version, strict=True)


def test_nodes_have_a_gpu_per_rank(tmp_path: Path) -> None:
    engine = settings(tmp_path).engine
    assert engine.uses_ray
    counts = [container(node)["resources"]["limits"]["nvidia.com/gpu"] for node in NODES]
    assert [int(node["rayStartParams"]["num-gpus"]) for node in NODES] == counts
    assert counts[0] + WORKERS["replicas"] * counts[1] == engine.num_ranks


def test_server_is_probed_and_reached_at_its_port(tmp_path: Path) -> None:
    server = settings(tmp_path).server
    ports = {port["name"]: port["containerPort"] for port in container(HEAD)["ports"]}
    assert ports["http"] == server.port
    probes = [probe for name, probe in container(HEAD).items() if name.endswith("Probe")]
    assert [probe["httpGet"]["port"] for probe in probes] == ["http"] * 3
    assert SERVICE["spec"]["selector"]["ray.io/cluster"] == CLUSTER["metadata"]["name"]


def test_ranks_are_kept_until_the_service_has_drained(tmp_path: Path) -> None:
    server = settings(tmp_path).server
    waits, ranks = (container(node)["lifecycle"]["preStop"]["exec"]["command"] for node in NODES)
    endpoint = int(chart_values()["drain"]["endpointSeconds"])
    assert waits == ["sleep", str(endpoint)]
    graces = [node["template"]["spec"]["terminationGracePeriodSeconds"] for node in NODES]
    assert graces[0] >= endpoint + server.drain_seconds + server.stop_seconds
    assert graces[1] > graces[0]
    assert ranks[:2] == ["bash", "-c"] and "while ray health-check --address" in ranks[2]
    assert "/cache/head" in ranks[2] and "/cache/head" in container(WORKERS)["args"][0]


def test_pods_are_as_restricted_as_those_of_the_chart() -> None:
    values = chart_values()
    for node in NODES:
        assert node["template"]["spec"]["securityContext"] == values["podSecurityContext"]
        assert container(node)["securityContext"] == values["securityContext"]


def test_only_the_own_pods_reach_ray_and_they_reach_nothing_else() -> None:
    own = {"podSelector": {"matchLabels": {"ray.io/cluster": CLUSTER["metadata"]["name"]}}}
    policy = POLICY["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ranks, callers = policy["ingress"]
    assert ranks == {"from": [own]}
    assert callers["ports"] == [{"protocol": "TCP", "port": "http"}]
    assert not any("namespaceSelector" in peer for peer in callers["from"])
    names, pods = policy["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert pods == {"to": [own]}


def test_nodes_of_ray_authenticate_and_send_no_usage_reports() -> None:
    for node in NODES:
        variables = {one["name"]: one["value"] for one in container(node)["env"]}
        assert variables["RAY_AUTH_MODE"] == "token"
        assert variables["RAY_USAGE_STATS_ENABLED"] == "0"
        mounts = {mount["name"]: mount["mountPath"] for mount in container(node)["volumeMounts"]}
        assert variables["RAY_AUTH_TOKEN_PATH"] == f"{mounts['ray']}/token"
        (secret,) = (v for v in node["template"]["spec"]["volumes"] if v["name"] == "ray")
        assert secret["secret"]["secretName"] == "coppice-ray"


def test_files_in_the_settings_are_mounted(tmp_path: Path) -> None:
    mounts = {mount["mountPath"] for mount in container(HEAD)["volumeMounts"]}
    keys_file = settings(tmp_path).server.keys_file
    assert keys_file is not None and str(keys_file.parent) in mounts
    assert (
        f"--config {next(mount for mount in mounts if 'settings' in mount)}/settings.yaml"
        in (container(HEAD)["args"][0])
    )
    assert all(
        "/models" in [mount["mountPath"] for mount in container(node)["volumeMounts"]]
        for node in NODES
    )


def test_ray_has_the_locked_version() -> None:
    lock = (HERE.parent / "requirements" / "ray.txt").read_text()
    assert f"\nray=={CLUSTER['spec']['rayVersion']} \\" in lock
    assert f'"ray=={CLUSTER["spec"]["rayVersion"]}"' in (HERE.parent / "pyproject.toml").read_text()
