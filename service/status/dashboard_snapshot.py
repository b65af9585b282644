"""Snapshot of the server's activity for the live page at /ui.

A snapshot never holds prompts, tokens, text or KV handles. Its size and the work to make it are
bounded, whatever the server runs: the MAX_ constants are the bounds.
"""

import heapq
import json
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from prometheus_client import CollectorRegistry

from engine.protocol.generation import Generation
from engine.types.feature_stats import SpeculationStats
from service.kv.handles.handle import Handle
from service.kv.handles.manager import PromptKvManager
from service.rollouts.groups.group import Group
from service.rollouts.rollout import Rollout
from service.rollouts.trees.tree_growth import TreePaths
from service.server import Server
from service.status.session_snapshot import session_snapshots
from service.status.status import status
from service.status.tree_snapshot import RunningPath, spans_of, tree_snapshot

MAX_ROLLOUTS = 20
MAX_GROUPS = 24  # of one rollout
MAX_SAMPLES = 64  # of one group
MAX_ROWS = 1024  # samples, segments and running paths of all rollouts and sessions
MAX_LEASES = 8
MAX_VERSIONS = 12
INTERVAL_SECONDS = 1.0

LOAD = {
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:kv_cache_usage_perc": "kv_usage",
}


class Snapshots:
    """The latest snapshot as JSON. All viewers share it, so their number does not add work."""

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._made_at = float("-inf")
        self._text = ""

    def latest(self) -> str:
        now = self._clock()
        if now - self._made_at >= INTERVAL_SECONDS / 2:
            self._text, self._made_at = json.dumps(snapshot(self._server)), now
        return self._text


class _Rows:
    """Number of rows that the snapshot being made may still list."""

    def __init__(self) -> None:
        self._left = MAX_ROWS

    def take(self, number: int) -> int:
        taken = min(number, self._left)
        self._left -= taken
        return taken


def snapshot(server: Server) -> dict[str, Any]:
    state = status(server)
    rollouts = server.rollouts.in_flight()
    rows = _Rows()
    return {
        "stage": state.stage,
        "reason": server.engine.health().reason,
        "paused": state.paused,
        "draining": server.readiness.draining,
        "model": None if state.engine is None else state.engine.model,
        "uptime_seconds": state.uptime_seconds,
        "heartbeat_seconds": server.engine.health().age_seconds,
        "samples": {
            "running": state.num_samples_running,
            "admitted": server.admission.num_samples,
            "limit": server.settings.limits.max_samples_running,
        },
        "load": engine_load(server.metrics.vllm_registry),
        "num_versions": len(server.versions.all()),
        "versions": _versions(server),
        "kv": {**_kv_arena(server.prompt_kv), "transfers": server.kv_downloads.num_open},
        "speculation": speculation(server.engine.stats(SpeculationStats)),
        "features": state.model_dump(mode="json").get("features"),
        "num_rollouts": len(rollouts),
        "rollouts": [_rollout(server.engine, r, rows) for r in rollouts[:MAX_ROLLOUTS]],
        "num_sessions": server.sessions.num_open,
        "sessions": session_snapshots(
            server.sessions.open_sessions(),
            server.engine,
            server.sessions.now(),
            rows.take,
        ),
    }


def engine_load(registry: CollectorRegistry) -> dict[str, float] | None:
    """Load of vLLM from its own metrics, summed over its engines; KV-cache usage is the maximum.

    None if the registry lacks one of them.
    """
    found: dict[str, list[float]] = {}
    for family in registry.restricted_registry(LOAD).collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    if not found.keys() >= LOAD.keys():
        return None
    return {
        name: (max if name == "kv_usage" else sum)(found[series]) for series, name in LOAD.items()
    }


def _versions(server: Server) -> list[dict[str, Any]]:
    """The newest versions, newest first, and the active one even if it is older."""
    newest = server.versions.all()[::-1]
    shown = newest[:MAX_VERSIONS]
    if server.versions.active not in shown:
        shown[-1] = server.versions.active
    return [
        {"version": v.label, "sequence": v.sequence, "state": v.state, "num_bytes": v.num_bytes}
        for v in shown
    ]


def speculation(stats: SpeculationStats) -> dict[str, Any] | None:
    """Live-page data of speculative decoding; None until a draft has been verified.

    Has the acceptance ratio, the speedup and the number of drafts by length.
    """
    drafts = sorted((length, number) for length, number in stats.drafts.items() if number)
    if not drafts:
        return None
    return {"acceptance": stats.acceptance_ratio, "gain": stats.gain_ratio, "drafts": drafts}


def _kv_arena(prompt_kv: PromptKvManager) -> dict[str, Any]:
    """Live-page data of the prompt-KV arena: usage, and the `MAX_LEASES` first leases to expire.

    Handles whose lease has not begun, because their rollout is still running, come last.
    """
    leases = [
        {
            "owner": handle.owner,
            "version": handle.entry.layout.version,
            "tokens": handle.entry.layout.num_tokens,
            "num_bytes": handle.entry.layout.file_bytes,
            "readers": handle.entry.pins,
            "lease_seconds": handle.remaining_seconds if handle.has_started else None,
        }
        for handle in heapq.nsmallest(MAX_LEASES, prompt_kv.handles, key=_expiry_key)
    ]
    return {**prompt_kv.status().model_dump(), "leases": leases}


def _expiry_key(handle: Handle) -> tuple[bool, float]:
    return not handle.has_started, handle.remaining_seconds


def _rollout(engine: Generation, rollout: Rollout, rows: _Rows) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "owner": rollout.owner,
        "num_groups": len(rollout.groups),
        "num_samples": rollout.num_samples,
        "groups": [_group(engine, group, rows) for group in rollout.groups[:MAX_GROUPS]],
    }


def _group(engine: Generation, group: Group, rows: _Rows) -> dict[str, Any]:
    paths = group.sampler.paths
    return {
        "index": group.options.index,
        "n": group.options.n,
        "prompt_tokens": len(group.options.prompt_token_ids),
        "max_tokens": group.options.sampling.max_tokens,
        "running": group.num_running,
        "done": group.num_done,
        "samples": _samples(engine, group, rows) if paths is None else [],
        "tree": None if paths is None else _tree(engine, group, paths, rows),
    }


def _samples(engine: Generation, group: Group, rows: _Rows) -> list[dict[str, Any]]:
    """Finished and running samples of a group, by index."""
    ended = group.ended[: rows.take(min(MAX_SAMPLES, len(group.ended)))]
    found = [
        {
            "index": sample.index,
            "tokens": len(sample.token_ids),
            "finish_reason": sample.finish_reason,
            "versions": spans_of((s.version, s.end - s.start) for s in sample.versions),
        }
        for sample in ended
    ]
    left = rows.take(min(MAX_SAMPLES - len(ended), group.num_running))
    found += _running_samples(engine, group, left)
    return sorted(found, key=lambda sample: sample["index"])


def _running_samples(engine: Generation, group: Group, number: int) -> list[dict[str, Any]]:
    indices = list(islice(group.running_indices(), number))
    progress = engine.progress([group.sample_ids[index] for index in indices])
    return [
        {
            "index": index,
            "tokens": sum(tokens for _, tokens in spans),
            "finish_reason": None,
            "versions": spans_of(spans),
        }
        for index, found in zip(indices, progress, strict=True)
        for spans in [group.prior_spans(index) + [(s.version, s.end - s.start) for s in found]]
    ]


def _tree(engine: Generation, group: Group, paths: TreePaths, rows: _Rows) -> dict[str, Any]:
    """Live-page data of a tree, without the segments that were dropped."""
    exports = group.exports
    running = [
        RunningPath(path.id, path.name, path.parent_id, path.bounds.limit)
        for path in paths.running.values()
    ]
    tree = tree_snapshot(
        engine,
        paths.tree.by_id.values(),
        paths.tree.num_segments,
        running,
        rows.take,
        has_kv=lambda each: exports is not None and exports.state(each.id).kv is not None,
    )
    return {**tree, "num_running": len(running)}
