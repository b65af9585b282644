"""The chart rendered by Helm, as parsed objects."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from helm.golden import CHART, EXAMPLES, templates

Object = dict[str, Any]
WITH_KEYS: Object = {"auth": {"existingSecret": "keys"}}
FILES = [*sorted((Path(__file__).parent / "values").glob("*.yaml")), *EXAMPLES]


def values_of(file: Path) -> Object:
    values: Object = yaml.safe_load(file.read_text(encoding="utf-8"))
    return values


@cache
def defaults() -> Object:
    return values_of(CHART / "values.yaml")


def objects(values: Object, **release: str) -> list[Object]:
    """The objects, copied for every caller."""
    return deepcopy(_objects(json.dumps(values), **release))


@cache
def _objects(values: str, **release: str) -> list[Object]:
    texts = templates(json.loads(values), **release).values()
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def one(kind: str, values: Object, **release: str) -> Object:
    [found] = [o for o in objects(values, **release) if o["kind"] == kind]
    return found


def kinds(values: Object) -> set[str]:
    return {found["kind"] for found in objects(values)}


def pod_template(values: Object) -> Object:
    """Pod template of the Deployment or the LeaderWorkerSet."""
    if "LeaderWorkerSet" in kinds(values):
        group = one("LeaderWorkerSet", values)["spec"]["leaderWorkerTemplate"]
        found: Object = group["workerTemplate"]
    else:
        found = one("Deployment", values)["spec"]["template"]
    return found


def pod(values: Object) -> Object:
    spec: Object = pod_template(values)["spec"]
    return spec


def pod_labels(values: Object) -> dict[str, str]:
    labels: dict[str, str] = pod_template(values)["metadata"]["labels"]
    return labels


def container(values: Object) -> Object:
    [found] = pod(values)["containers"]
    return dict(found)


def settings(values: Object) -> Object:
    [config] = [
        o
        for o in objects(values)
        if o["kind"] == "ConfigMap" and "settings.yaml" in o.get("data", {})
    ]
    written: Object = yaml.safe_load(config["data"]["settings.yaml"])
    return written
