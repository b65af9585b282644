"""Invariants of the pods of a release."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.sources import load_settings
from service.http.serve import GRACEFUL_SHUTDOWN_SECONDS
from tests.helm.chart import (
    FILES,
    WITH_KEYS,
    Object,
    container,
    defaults,
    kinds,
    objects,
    one,
    pod,
    pod_labels,
    settings,
    values_of,
)

pytestmark = pytest.mark.slow

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def value(values: Object, *path: str) -> Any:
    """The configured value, or the default."""
    for tree in (values, defaults()):
        found: Any = tree
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            return found
    raise AssertionError(path)


@every_file
def test_server_accepts_the_settings(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "settings.yaml"
    values = values_of(file)
    written.write_text(yaml.safe_dump(settings(values)))
    variables = {entry["name"]: entry.get("value", "") for entry in container(values)["env"]}
    expanded = {
        "$(POD_IP)": "10.0.0.7",
        "$(LWS_LEADER_ADDRESS)": "rl-coppice-nodes-0.rl-coppice-nodes.rl",
        "$(LWS_WORKER_INDEX)": "1",
    }
    for name, text in variables.items():
        for variable, content in expanded.items():
            text = text.replace(variable, content)
        variables[name] = text
    load_settings(environ=variables, file=written)


def test_replicas_authenticate_with_the_key_of_the_secret() -> None:
    values = values_of(Path(__file__).parent / "values" / "peers.yaml")
    file = Path(settings(values)["weights"]["peer_key_file"])
    [volume] = [v for v in pod(values)["volumes"] if v["name"] == "keys"]
    assert {"key": "peer-key", "path": file.name} in volume["secret"]["items"]
    policy = one("NetworkPolicy", values)["spec"]
    own = {"matchLabels": policy["podSelector"]["matchLabels"]}
    assert {"podSelector": own} in [peer for way in policy["ingress"] for peer in way["from"]]
    assert {"podSelector": own} in [p for way in policy["egress"] for p in way.get("to", [])]


@every_file
def test_grace_period_is_the_sum_of_the_drain(file: Path) -> None:
    values = values_of(file)
    names = ("endpointSeconds", "requestSeconds", "teardownSeconds")
    endpoint, request, teardown = (value(values, "drain", name) for name in names)
    assert pod(values)["terminationGracePeriodSeconds"] == endpoint + request + teardown
    assert settings(values)["server"]["drain_seconds"] == request
    assert container(values)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(endpoint)]
    assert teardown > GRACEFUL_SHUTDOWN_SECONDS


@every_file
def test_probes_use_three_paths_at_a_named_port(file: Path) -> None:
    values = values_of(file)
    found = container(values)
    probes = {name: found[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert [p["httpGet"]["path"] for p in probes.values()] == ["/startupz", "/readyz", "/livez"]
    assert {p["httpGet"]["port"] for p in probes.values()} == {"http"}
    assert found["ports"][0]["name"] == "http"
    assert found["ports"][0]["containerPort"] == settings(values)["server"]["port"]
    liveness = probes["liveness"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60, "a restart is dear"


@every_file
def test_start_has_one_time_budget(file: Path) -> None:
    values = values_of(file)
    seconds = value(values, "probes", "startup", "maxSeconds")
    probe = container(values)["startupProbe"]
    assert probe["failureThreshold"] == math.ceil(seconds / probe["periodSeconds"])
    assert settings(values)["engine"]["start_seconds"] == seconds
    if "Deployment" in kinds(values):
        assert one("Deployment", values)["spec"]["progressDeadlineSeconds"] > seconds


@every_file
def test_shared_memory_is_the_sum_of_the_values(file: Path) -> None:
    values = values_of(file)
    [shm] = [v for v in pod(values)["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    size = int(shm["emptyDir"]["sizeLimit"])
    memory = container(values)["resources"]["limits"]["memory"]
    assert 0 < size < int(memory.removesuffix("Gi")) * 2**30


def test_span_memory_is_granted_in_full() -> None:
    """Half of the mount without the arena holds the spans, in addition to the engine's share."""
    shm = {"engine": "4608Mi", "arena": "1Gi"}
    resources = {"limits": {"memory": "16Gi"}}
    values = {**WITH_KEYS, "shm": shm, "resources": resources, "kv": {"spans_bytes": 4 * 2**30}}
    [mount] = [v for v in pod(values)["volumes"] if v["name"] == "shm"]
    size = int(mount["emptyDir"]["sizeLimit"])
    assert size == (4608 + 2 * 1024 + 4096) * 2**20
    assert (size - 2**30) / 2 >= 4 * 2**30


def test_arena_is_granted_in_full() -> None:
    """The server takes at most half of the mount's free space."""
    values = {**WITH_KEYS, "shm": {"engine": "512Mi", "arena": "2G"}}
    [shm] = [v for v in pod(values)["volumes"] if v["name"] == "shm"]
    assert int(shm["emptyDir"]["sizeLimit"]) == 512 * 2**20 + 2 * 2 * 10**9


@every_file
def test_selector_labels_are_on_the_pods_and_constant(file: Path) -> None:
    values = values_of(file)
    selector = {"app.kubernetes.io/name": "coppice", "app.kubernetes.io/instance": "rl"}
    assert selector.items() <= pod_labels(values).items()
    if "Deployment" in kinds(values):
        assert one("Deployment", values)["spec"]["selector"]["matchLabels"] == selector
        assert one("Service", values)["spec"]["selector"] == selector
    else:
        first = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
        assert one("Service", values)["spec"]["selector"] == selector | first


def test_engine_on_several_machines_is_one_group_of_equal_pods() -> None:
    values = values_of(Path(__file__).parent / "values" / "two-nodes-cpu.yaml")
    group = one("LeaderWorkerSet", values)
    assert group["spec"]["leaderWorkerTemplate"]["size"] == settings(values)["engine"]["nnodes"]
    assert group["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "replicas" not in group["spec"]
    target = one("HorizontalPodAutoscaler", values)["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LeaderWorkerSet", group["metadata"]["name"])
    assert group["metadata"]["name"] != one("Service", values)["metadata"]["name"]
    policy = one("NetworkPolicy", values)["spec"]
    own = [{"podSelector": {"matchLabels": policy["podSelector"]["matchLabels"]}}]
    assert {"from": own} in policy["ingress"]
    assert {"to": own} in policy["egress"]


def test_pods_of_an_engine_share_the_published_weights_of_their_replica() -> None:
    values = values_of(Path(__file__).parent / "values" / "two-nodes-cpu.yaml")
    [mount] = [m for m in container(values)["volumeMounts"] if m["name"] == "weights"]
    assert settings(values)["weights"]["directory"] == mount["mountPath"]
    assert mount["subPathExpr"] == "$(LWS_LEADER_ADDRESS)"
    [volume] = [v for v in pod(values)["volumes"] if v["name"] == "weights"]
    assert volume["persistentVolumeClaim"] == {"claimName": "weights"}


@every_file
def test_pods_are_confined(file: Path) -> None:
    values = values_of(file)
    spec, found = pod(values), container(values)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 10000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert not {"hostIPC", "hostPID", "hostNetwork", "hostname"} & spec.keys()
    assert found["securityContext"]["allowPrivilegeEscalation"] is False
    assert found["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "command" not in found, "the image's own entrypoint gets the signals"
    writable = "writable" in file.stem
    assert found["securityContext"]["readOnlyRootFilesystem"] is not writable


@every_file
def test_image_is_never_latest(file: Path) -> None:
    image = container(values_of(file))["image"]
    assert not image.endswith(":latest")
    assert ":" in image or "@sha256:" in image


@every_file
def test_no_object_contains_a_secret(file: Path) -> None:
    values = values_of(file)
    assert "Secret" not in kinds(values)
    keys = settings(values)["server"].get("keys_file")
    mounts = {m["name"]: m["mountPath"] for m in container(values)["volumeMounts"]}
    assert (keys is None) == ("keys" not in mounts)
    if keys is not None:
        [volume] = [v for v in pod(values)["volumes"] if v["name"] == "keys"]
        assert keys == f"{mounts['keys']}/{volume['secret']['items'][0]['path']}"


@every_file
def test_objects_have_unique_names_and_a_namespace(file: Path) -> None:
    found = [o for o in objects(values_of(file)) if not o["metadata"]["name"].endswith("more")]
    assert len({(o["kind"], o["metadata"]["name"]) for o in found}) == len(found)
    assert {o["metadata"]["namespace"] for o in found} == {"rl"}


def test_replicas_are_omitted_with_an_autoscaler() -> None:
    assert one("Deployment", WITH_KEYS)["spec"]["replicas"] == 1
    for kind in ("hpa", "keda"):
        values = {**WITH_KEYS, "autoscaling": {"kind": kind}}
        assert "replicas" not in one("Deployment", values)["spec"]


@pytest.mark.parametrize(
    ("values", "present"),
    [
        ({"replicaCount": 1}, False),
        ({"replicaCount": 2}, True),
        ({"replicaCount": 2, "pdb": {"enabled": False}}, False),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 1}}, False),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 2}, "replicaCount": 1}, True),
    ],
)
def test_only_several_replicas_have_a_disruption_budget(values: Object, present: bool) -> None:
    assert ("PodDisruptionBudget" in kinds({**WITH_KEYS, **values})) is present
    if present:
        assert one("PodDisruptionBudget", {**WITH_KEYS, **values})["spec"]["maxUnavailable"] == 1


def test_autoscaler_selects_only_its_own_release() -> None:
    keda = {**WITH_KEYS, "autoscaling": {"kind": "keda"}}
    [trigger] = one("ScaledObject", keda, name="a", namespace="b")["spec"]["triggers"]
    assert 'job="a-coppice",namespace="b"' in trigger["metadata"]["query"]
    hpa = {**WITH_KEYS, "autoscaling": {"kind": "hpa"}}
    spec = one("HorizontalPodAutoscaler", hpa, name="a", namespace="b")["spec"]
    [metric] = spec["metrics"]
    labels = {"job": "a-coppice", "namespace": "b"}
    assert metric["external"]["metric"]["selector"]["matchLabels"] == labels
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= 300


def test_rules_are_restricted_to_the_release() -> None:
    values = {**WITH_KEYS, "prometheusRule": {"enabled": True}}
    groups = one("PrometheusRule", values, name="a", namespace="b")["spec"]["groups"]
    queries = [rule["expr"] for group in groups for rule in group["rules"]]
    assert len(queries) > 20
    assert not [query for query in queries if 'job="coppice"' in query]
    assert all('job="a-coppice",namespace="b"' in query for query in queries)
    service = one("Service", values, name="a", namespace="b")["metadata"]["name"]
    assert service == "a-coppice", "the operator names the job after the Service"


def test_only_listed_callers_reach_the_pods() -> None:
    trainers = [{"podSelector": {"matchLabels": {"app": "trainer"}}}]
    values = {**WITH_KEYS, "networkPolicy": {"callers": trainers}}
    spec = one("NetworkPolicy", values)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    api, metrics = spec["ingress"]
    assert api["from"] == trainers
    assert metrics["from"] == defaults()["networkPolicy"]["metricsFrom"]
    assert all(rule["from"] for rule in spec["ingress"]), "an empty list would be everybody"
    [dns] = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}


def test_admin_calls_and_scrapes_have_a_separate_port_if_configured() -> None:
    trainers = [{"podSelector": {"matchLabels": {"app": "trainer"}}}]
    values = {
        **WITH_KEYS,
        "operatorsPort": 8001,
        "serviceMonitor": {"enabled": True},
        "networkPolicy": {"operators": trainers},
    }
    server = settings(values)["server"]
    assert (server["operators_host"], server["operators_port"]) == ("0.0.0.0", 8001)
    ports = {port["name"]: port["containerPort"] for port in container(values)["ports"]}
    assert ports == {"http": 8000, "operators": 8001}
    assert [p["name"] for p in one("Service", values)["spec"]["ports"]] == ["http", "operators"]
    [endpoint] = one("ServiceMonitor", values)["spec"]["endpoints"]
    assert endpoint["port"] == "operators"
    callers, operators, scrapes = one("NetworkPolicy", values)["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in (callers, operators, scrapes)] == [
        "http",
        "operators",
        "operators",
    ]
    assert operators["from"] == trainers


def test_without_a_list_of_callers_only_the_namespace_has_access() -> None:
    api = one("NetworkPolicy", WITH_KEYS)["spec"]["ingress"][0]
    assert api["from"] == [{"podSelector": {}}]
