"""The example behind a gateway with an endpoint picker: its pool and its route fit the chart."""

import pytest

from helm.golden import HERE
from tests.helm.chart import Object, container, one, pod_labels, values_of

pytestmark = pytest.mark.slow

VALUES = values_of(HERE / "examples" / "inference-gateway.yaml")


def backends() -> dict[str, Object]:
    """The backend of every path of the route."""
    rules = one("HTTPRoute", VALUES)["spec"]["rules"]
    return {m["path"]["value"]: rule["backendRefs"][0] for rule in rules for m in rule["matches"]}


def test_pool_selects_the_pods_and_their_port() -> None:
    pool = one("InferencePool", VALUES)["spec"]
    assert pool["selector"]["matchLabels"].items() <= pod_labels(VALUES).items()
    ports = {port["name"]: port["containerPort"] for port in container(VALUES)["ports"]}
    assert pool["targetPorts"] == [{"number": ports["http"]}]


def test_pool_selects_the_pods_that_serve_if_a_replica_has_several() -> None:
    values = values_of(HERE / "examples" / "two-nodes.yaml")
    values["extraObjects"] = VALUES["extraObjects"]
    labels = one("InferencePool", values)["spec"]["selector"]["matchLabels"]
    assert labels == one("Service", values)["spec"]["selector"]
    assert labels["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_route_sends_sampling_to_the_pool_and_the_rest_to_the_service() -> None:
    pool = one("InferencePool", VALUES)["metadata"]["name"]
    service = one("Service", VALUES)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert (backends()[path]["kind"], backends()[path]["name"]) == ("InferencePool", pool)
    (port,) = service["spec"]["ports"]
    assert backends()["/"] == {"name": service["metadata"]["name"], "port": port["port"]}
