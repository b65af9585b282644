"""List of optional features with their state, reason and setting, for GET /v1/status.

The same list is printed at start and is part of GET /v1/status. It names settings, never their
values that could be secret or a path.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from coppice.wire.status import FeatureStatus
from service.kv.arena import MIN_DEFAULT_BYTES

if TYPE_CHECKING:
    from service.server import Server

MIB = 2**20
OFF = {
    "unsupported_cache": "the model's KV cache cannot be exported",
    "no_shm": "kv.directory has too little shared memory",
    "internal": "an error, which is logged, has switched it off",
    "not_movable": "the model's keys cannot be moved to other positions",
}


def features(server: "Server") -> list[FeatureStatus]:
    """All optional features, once the engine has started."""
    engine = [
        FeatureStatus.model_validate(feature, from_attributes=True)
        for feature in server.engine.info.features
    ]
    return [_prompt_kv(server), _kv_reuse(server), *engine, *_of_the_service(server)]


def table(listed: Iterable[FeatureStatus]) -> str:
    """Features as the table that is printed at start."""
    rows = [
        (feature.name, "on" if feature.enabled else "off", feature.reason, feature.how_to_change)
        for feature in listed
    ]
    rows.insert(0, ("feature", "", "reason", "changed by"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _feature(name: str, enabled: object, reason: str, how: str) -> FeatureStatus:
    return FeatureStatus(name=name, enabled=bool(enabled), reason=reason, how_to_change=how)


def _prompt_kv(server: "Server") -> FeatureStatus:
    kv, setting = server.prompt_kv, server.settings.engine.prompt_kv
    if kv.reason is None:
        num_mib = kv.store.extents.capacity_bytes // MIB
        reason = f"up to {num_mib} MiB of shared memory, taken as it is used"
        return _feature("prompt_kv", True, reason, "engine.prompt_kv: false")
    if kv.reason != "disabled":
        return _feature("prompt_kv", False, OFF.get(kv.reason or "internal", "it failed"), "")
    if server.settings.engine.uses_several_machines:
        reason, how = "it is not supported on several machines", _one_machine(server)
    elif setting is False:
        reason, how = "engine.prompt_kv is false", "engine.prompt_kv: true"
    else:
        least = MIN_DEFAULT_BYTES // MIB
        reason = f"kv.directory has less than {2 * least} MiB free"
        how = "more shared memory (docker run --shm-size, shm.arena of the chart)"
    return _feature("prompt_kv", False, reason, how)


def _one_machine(server: "Server") -> str:
    uses_ray = server.settings.engine.uses_ray
    return "engine.distributed_executor_backend: mp" if uses_ray else "engine.nnodes: 1"


def _kv_reuse(server: "Server") -> FeatureStatus:
    reason = server.kv_reuse.spans.reason
    if reason is None:
        return _feature("kv_reuse", True, "spans of prompts can be spliced", "kv.spans_bytes: 0")
    if server.prompt_kv.reason is not None:
        return _feature("kv_reuse", False, "it needs prompt_kv", "as prompt_kv")
    off = OFF.get(reason, "kv.spans_bytes is 0")
    return _feature("kv_reuse", False, off, "kv.spans_bytes" if reason == "disabled" else "")


def _of_the_service(server: "Server") -> list[FeatureStatus]:
    settings = server.settings
    shared, peers = settings.cluster.redis_url, settings.weights.peers
    keys, port = settings.server.keys_file, settings.server.operators_port
    traces, ui = settings.trace.endpoint, settings.server.ui
    return [
        _setting("cluster", "cluster.redis_url", shared, "replicas share a registry"),
        _setting("weight_replication", "weights.peers", peers, "weights come from replicas"),
        _setting("authentication", "server.keys_file", keys, "requests need an API key"),
        _setting("operators_port", "server.operators_port", port, "operators have their own port"),
        _setting("tracing", "trace.endpoint", traces, "traces are exported"),
        _setting("dashboard", "server.ui", ui, "the live page is served at /ui"),
    ]


def _setting(name: str, path: str, value: object, reason: str) -> FeatureStatus:
    """A feature that one setting enables."""
    is_on = value is not None and value is not False and value != ()
    return _feature(name, is_on, reason if is_on else f"{path} is not set", path)
