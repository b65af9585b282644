"""Generator of values.schema.json from the chart's values and the server's settings.

Values that the server would reject at startup are rejected at render time. Run `python -m
helm.schema`.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from engine.attention.settings import AttentionSettings
from engine.cudagraphs.settings import GraphsSettings
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from service.config.cluster import ClusterSettings
from service.config.limits import LimitsSettings
from service.config.prompt_kv import KvSettings
from service.config.sessions import SessionsSettings
from service.config.settings import LogSettings, TraceSettings, WeightsSettings

FILE = Path(__file__).parent / "coppice" / "values.schema.json"
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
SWITCH: Schema = {"type": "boolean"}
ANYTHING: Schema = {"type": "object"}
LIST: Schema = {"type": "array"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+([KMGT]i?|k)?$"}
DURATION: Schema = {"type": "string", "pattern": "^[0-9]+s$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
# Set by the chart itself, from other values.
SET_BY_THE_CHART = {
    *("model", "revision", "start_seconds", "prompt_kv"),
    *("node_rank", "master_addr"),
    *("directory", "cache_directory", "capacity_bytes", "peer_key_file"),
    # Passwords must not be in a ConfigMap.
    *("redis_url", "redis_user", "redis_password_file"),
}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def tree(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings(model: type[BaseModel]) -> Schema:
    """Schema of a settings section, without the fields that the chart sets."""
    schema = model.model_json_schema()
    fields = {
        name: _without_defaults(field)
        for name, field in schema["properties"].items()
        if name not in SET_BY_THE_CHART
    }
    return tree(**fields)


def _without_defaults(field: Schema) -> Schema:
    return {name: value for name, value in field.items() if name not in ("default", "title")}


def schema() -> Schema:
    probe = {"periodSeconds": POSITIVE, "failureThreshold": POSITIVE, "timeoutSeconds": POSITIVE}
    image = {
        "repository": {"type": "string", "minLength": 1},
        "tag": TEXT,
        "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
        "pullPolicy": one_of("IfNotPresent", "Always", "Never"),
        "pullSecrets": {"type": "array", "items": TEXT},
    }
    values = tree(
        nameOverride=TEXT,
        fullnameOverride=TEXT,
        image=tree(**image),
        replicaCount=COUNT,
        strategy=tree(type=one_of("RollingUpdate", "Recreate"), rollingUpdate=ANYTHING),
        model=tree(
            name=TEXT,
            revision={"type": "string", "pattern": "^([0-9a-f]{40})?$"},
            offline=SWITCH,
            existingClaim=TEXT,
            mountPath={"type": "string", "pattern": "^/."},
        ),
        engine=settings(EngineSettings),
        attention=settings(AttentionSettings),
        speculation=settings(SpeculationSettings),
        graphs=settings(GraphsSettings),
        kv=settings(KvSettings),
        limits=settings(LimitsSettings),
        sessions=settings(SessionsSettings),
        weights=settings(WeightsSettings),
        cluster=settings(ClusterSettings),
        log=settings(LogSettings),
        trace=settings(TraceSettings),
        auth=tree(
            existingSecret=TEXT,
            secretKey=TEXT,
            peerSecretKey=TEXT,
            allowOpen=SWITCH,
            allowedHosts={"type": "array", "items": {"type": "string", "minLength": 1}},
        ),
        fleet=tree(
            advertisedUrl={"type": "string", "pattern": "^(https?://.+)?$"},
            redis=tree(
                url={"type": "string", "pattern": "^(rediss?://[^@?#]+)?$"},
                user=TEXT,
                existingSecret=TEXT,
                secretKey=TEXT,
                peers=LIST,
            ),
        ),
        service=tree(
            type=one_of("ClusterIP", "NodePort", "LoadBalancer"), port=PORT, annotations=LABELS
        ),
        containerPort=PORT,
        ui=SWITCH,
        operatorsPort={"type": "integer", "minimum": 0, "maximum": 65535},
        gpu=tree(count=COUNT, resourceName=TEXT),
        resources=tree(requests=ANYTHING, limits=ANYTHING, claims=LIST),
        shm=tree(engine=QUANTITY, arena=QUANTITY),
        cache=tree(size=QUANTITY, existingClaim=TEXT, weightsClaim=TEXT),
        probes=tree(
            startup=tree(maxSeconds=POSITIVE, periodSeconds=POSITIVE),
            readiness=tree(**probe),
            liveness=tree(**probe),
        ),
        drain=tree(endpointSeconds=COUNT, requestSeconds=COUNT, teardownSeconds=POSITIVE),
        autoscaling=tree(
            kind=one_of("none", "hpa", "keda"),
            minReplicas=POSITIVE,
            maxReplicas=POSITIVE,
            samplesPerReplica=POSITIVE,
            scaleDownSeconds=COUNT,
            hpa=tree(metricName=TEXT),
            keda=tree(serverAddress=TEXT, pollingInterval=POSITIVE, fallbackReplicas=POSITIVE),
        ),
        pdb=tree(enabled=SWITCH),
        networkPolicy=tree(
            enabled=SWITCH, callers=LIST, operators=LIST, metricsFrom=LIST, extraEgress=LIST
        ),
        serviceMonitor=tree(
            enabled=SWITCH, labels=LABELS, interval=DURATION, scrapeTimeout=DURATION
        ),
        prometheusRule=tree(
            enabled=SWITCH,
            labels=LABELS,
            runbookUrl={"type": "string", "pattern": "^[^#\\s]+$"},
        ),
        dashboards=tree(enabled=SWITCH, labels=LABELS),
        serviceAccount=tree(name=TEXT, annotations=LABELS),
        podSecurityContext=ANYTHING,
        securityContext=ANYTHING,
        scheduling=tree(
            nodeSelector=LABELS,
            tolerations=LIST,
            affinity=ANYTHING,
            topologySpreadConstraints=LIST,
            priorityClassName=TEXT,
            runtimeClassName=TEXT,
        ),
        podLabels=LABELS,
        podAnnotations=LABELS,
        extraEnv=LIST,
        extraVolumes=LIST,
        extraVolumeMounts=LIST,
        extraObjects=LIST,
    )
    # Helm adds this to the values of every chart.
    values["properties"]["global"] = ANYTHING
    return {"$schema": "http://json-schema.org/draft-07/schema#", **values}


def render() -> str:
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
