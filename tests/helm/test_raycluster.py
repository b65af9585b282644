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
    grace = HEAD["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= server.drain_seconds + server.stop_seconds


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
