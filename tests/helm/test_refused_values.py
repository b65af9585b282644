"""Values refused by the render, and the error messages."""

from typing import Any

import pytest
from helm_python import HelmError

from helm.golden import templates
from service.config.settings import Settings, settings_fields
from tests.helm.chart import WITH_KEYS, Object, defaults

pytestmark = pytest.mark.slow
MISTAKES: list[tuple[str, Object]] = [
    ("containerPort", {"containerPort": "abc"}),
    ("replicas", {"replicas": 3}),
    ("probes", {"probes": {"startup": {"maxSecond": 5}}}),
    ("autoscaling", {"autoscaling": {"kind": "vpa"}}),
    ("digest", {"image": {"digest": "sha256:abc"}}),
    ("revision", {"model": {"name": "a/b", "revision": "main", "offline": False}}),
    ("block_size", {"engine": {"block_size": 8}}),
    ("max_sequence", {"engine": {"max_sequence": 8}}),
    ("level", {"log": {"level": "loud"}}),
    ("directory", {"weights": {"directory": "/elsewhere"}}),
    ("start_seconds", {"engine": {"start_seconds": 5}}),
    ("engine", {"shm": {"engine": "lots"}}),
    ("no Secret with keys", {"auth": {"existingSecret": ""}}),
    ("peer_key_file", {"weights": {"peer_key_file": "/elsewhere"}}),
    ("which names no Secret", {"auth": {"peerSecretKey": "k", "allowOpen": True}}),
    ("needs auth.peerSecretKey", {"weights": {"peers": ["http://one"]}}),
    ("are the same", {"operatorsPort": 8000}),
    ("exclude each other", {"auth": {"existingSecret": "keys", "allowOpen": True}}),
    ("leaves nothing of", {"shm": {"arena": "6Gi"}}),
    ("leaves nothing of", {"shm": {"engine": "3Gi", "arena": "3Gi"}}),
    ("shm.engine must be above 0", {"shm": {"engine": "0"}}),
    ("must be below shm.engine", {"kv": {"spans_bytes": 2**40}, "shm": {"arena": "1Gi"}}),
    ("needs shm.arena above 0", {"kv": {"spans_bytes": 2**20}, "shm": {"arena": "0"}}),
    ("limits.memory is needed", {"resources": {"limits": {"memory": None}}}),
    ("no quantity of bytes", {"resources": {"limits": {"memory": "6.5Gi"}}}),
    ("gpu.count is 2", {"gpu": {"count": 2}}),
    ("does not divide the 3 ranks", {"engine": {"nnodes": 2, "tensor_parallel_size": 3}}),
    (
        "gpu.count is 2 per pod",
        {"gpu": {"count": 2}, "engine": {"nnodes": 2, "tensor_parallel_size": 2}},
    ),
    ("shm.arena must be 0", {"engine": {"nnodes": 2, "tensor_parallel_size": 2}}),
    (
        "shared by the pods of a replica",
        {
            "engine": {"nnodes": 2, "tensor_parallel_size": 2},
            "shm": {"arena": "0"},
            "cache": {"existingClaim": "c"},
        },
    ),
    ("needs Ray nodes", {"engine": {"distributed_executor_backend": "ray"}}),
    ("node_rank", {"engine": {"node_rank": 1}}),
    ("data_parallel_size is 2", {"gpu": {"count": 1}, "engine": {"data_parallel_size": 2}}),
    (
        "engine.nnodes above 1 exclude",
        {
            "shm": {"arena": "0"},
            "engine": {"nnodes": 2, "data_parallel_size": 2, "tensor_parallel_size": 2},
        },
    ),
    (
        "speculation.mode siblings exclude",
        {"engine": {"data_parallel_size": 2}, "speculation": {"mode": "siblings"}},
    ),
    (
        "speculation.mode drafter exclude",
        {"engine": {"data_parallel_size": 2}, "speculation": {"mode": "drafter"}},
    ),
    (
        "engine.prompt_kv_gpu_bytes exclude",
        {"engine": {"data_parallel_size": 2, "prompt_kv_gpu_bytes": 2**30}},
    ),
    ("at least 15", {"drain": {"teardownSeconds": 5}}),
    ("model.revision is needed", {"model": {"name": "a/b", "offline": False}}),
    ("forbids fetching", {"model": {"name": "a/b", "revision": "a" * 40}}),
    ("not below model.mountPath", {"model": {"name": "/x/m", "existingClaim": "m"}}),
    ("cannot be shared", {"cache": {"existingClaim": "c"}, "replicaCount": 2}),
    (
        "cache.weightsClaim must be set",
        {"shm": {"arena": "0"}, "engine": {"nnodes": 2, "tensor_parallel_size": 2}},
    ),
    ("cache.weightsClaim is for", {"cache": {"weightsClaim": "w"}}),
    ("cannot be shared", {"cache": {"existingClaim": "c"}, "autoscaling": {"kind": "hpa"}}),
    ("above autoscaling.maxReplicas", {"autoscaling": {"minReplicas": 9}}),
    ("url", {"fleet": {"redis": {"url": "redis://user:password@host"}}}),
    ("url", {"fleet": {"redis": {"url": "redis://host?password=secret"}}}),
    ("names no Redis", {"fleet": {"redis": {"existingSecret": "s"}}}),
    ("must be below", {"serviceMonitor": {"enabled": True, "scrapeTimeout": "30s"}}),
]


@pytest.mark.parametrize(("words", "mistake"), MISTAKES, ids=[repr(m) for _, m in MISTAKES])
def test_mistake_is_refused_by_name(words: str, mistake: Object) -> None:
    with pytest.raises(HelmError, match=words):
        templates({**WITH_KEYS, **mistake})


def test_mistakes_are_the_only_invalid_values() -> None:
    templates(WITH_KEYS)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(tree, dict) or not tree:
        return [path]
    return [leaf for name, below in tree.items() for leaf in _leaves(below, (*path, name))]


@pytest.mark.parametrize(
    "path",
    [
        leaf
        for leaf in _leaves(defaults())
        if leaf[0] not in ("podSecurityContext", "securityContext", "resources", "strategy")
        and leaf[-1] != "grafana_dashboard"
    ],
    ids=".".join,
)
def test_every_value_has_a_type(path: tuple[str, ...]) -> None:
    """A wrong type must fail the render; otherwise the schema is not loaded at all."""
    wrong: Any = 7.5
    for name in reversed(path):
        wrong = {name: wrong}
    with pytest.raises(HelmError):
        templates({**WITH_KEYS, **wrong})


def test_every_server_setting_is_a_value_or_set_by_the_chart() -> None:
    by_the_chart = {
        "server": set(Settings.model_fields["server"].annotation.model_fields),  # type: ignore[union-attr]
        "engine": {
            *("model", "revision", "start_seconds", "prompt_kv"),
            *("cache_directory", "node_rank", "master_addr"),
        },
        "kv": {"directory", "capacity_bytes"},
        "weights": {"directory", "peer_key_file"},
        "cluster": {"redis_url", "redis_user", "redis_password_file"},
    }
    known = defaults()
    for section, name, field in settings_fields():
        if name in by_the_chart.get(section, set()):
            continue
        assert section in known
        if field.default is not None and isinstance(field.default, (int, str)):
            templates({**WITH_KEYS, section: {name: field.default}})
