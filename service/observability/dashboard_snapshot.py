"""Snapshots of the server's activity for the dashboard at /ui.

A snapshot never holds prompts, tokens, text or KV handles.
"""

import heapq
from collections import defaultdict
from typing import Any

from coppice.wire.result_formats import SampleRecord
from coppice.wire.rollouts import SampleAnswer, VersionSpan
from engine.feature_stats import SpeculationStats
from service.observability.status import status
from service.prompt_kv.handles import Handle
from service.prompt_kv.manager import PromptKvManager
from service.rollouts.group import Group
from service.rollouts.rollout import Rollout
from service.server import Server
from service.trees.tree_group import TreeGroup

MAX_ROLLOUTS = 20
MAX_GROUPS = 24  # of one rollout
MAX_SAMPLES = 64  # of one group
MAX_SEGMENTS = 256  # of one tree
MAX_LEASES = 8


def snapshot(server: Server) -> dict[str, Any]:
    state = status(server)
    rollouts = server.rollouts.in_flight()
    return {
        "stage": state.stage,
        "paused": state.paused,
        "model": None if state.engine is None else state.engine.model,
        "uptime_seconds": state.uptime_seconds,
        "heartbeat_seconds": server.engine.health().age_seconds,
        "samples": {
            "running": state.num_samples_running,
            "admitted": server.admission.num_samples,
            "limit": server.settings.limits.max_samples_running,
        },
        "versions": [
            {"version": v.label, "sequence": v.sequence, "state": v.state, "num_bytes": v.num_bytes}
            for v in reversed(server.versions.all())
        ],
        "kv": {**_kv_arena(server.prompt_kv), "transfers": server.socket_sender.num_transfers},
        "speculation": speculation(server.engine.speculation()),
        "num_rollouts": len(rollouts),
        "rollouts": [_rollout(rollout) for rollout in rollouts[:MAX_ROLLOUTS]],
    }


def speculation(stats: SpeculationStats) -> dict[str, Any] | None:
    """Dashboard data of speculative decoding; None until a draft has been verified.

    Has the acceptance ratio, the speedup and the number of drafts by length.
    """
    drafts = sorted((length, number) for length, number in stats.drafts.items() if number)
    if not drafts:
        return None
    return {"acceptance": stats.acceptance_ratio, "gain": stats.gain_ratio, "drafts": drafts}


def _kv_arena(prompt_kv: PromptKvManager) -> dict[str, Any]:
    """Dashboard data of the prompt-KV arena: usage, and the `MAX_LEASES` first leases to expire.

    Handles whose lease has not begun, because their rollout is still running, come last.
    """
    leases = [
        {
            "owner": handle.owner,
            "version": handle.slot.layout.version,
            "tokens": handle.slot.layout.num_tokens,
            "num_bytes": handle.slot.layout.file_bytes,
            "readers": handle.slot.pins,
            "lease_seconds": handle.remaining_seconds if handle.has_started else None,
        }
        for handle in heapq.nsmallest(MAX_LEASES, prompt_kv.handles, key=_expiry_key)
    ]
    return {**prompt_kv.status().model_dump(), "leases": leases}


def _expiry_key(handle: Handle) -> tuple[bool, float]:
    return not handle.has_started, handle.remaining_seconds


def _rollout(rollout: Rollout) -> dict[str, Any]:
    ended: defaultdict[int, list[SampleAnswer]] = defaultdict(list)
    for record in rollout.log:
        if isinstance(record, SampleRecord) and len(ended[record.group]) < MAX_SAMPLES:
            ended[record.group].append(record.sample)
    return {
        "id": rollout.id,
        "owner": rollout.owner,
        "num_groups": len(rollout.groups),
        "groups": [
            _group(group, ended[group.options.index]) for group in rollout.groups[:MAX_GROUPS]
        ],
    }


def _group(group: Group, ended: list[SampleAnswer]) -> dict[str, Any]:
    """Dashboard data of one group. The length of a sample is known once the sample has ended."""
    return {
        "index": group.options.index,
        "n": group.options.n,
        "prompt_tokens": len(group.options.prompt_token_ids),
        "max_tokens": group.options.sampling.max_tokens,
        "running": group.num_running,
        "ended": [_sample(sample) for sample in ended],
        "tree": _tree(group) if isinstance(group, TreeGroup) else None,
    }


def _sample(sample: SampleAnswer) -> dict[str, Any]:
    return {
        "index": sample.index,
        "tokens": len(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "versions": [_span(span) for span in sample.versions],
    }


def _tree(group: TreeGroup) -> dict[str, Any]:
    """Dashboard data of a tree: its segments except dropped ones, parents before children."""
    segments = group.tree.segments()[:MAX_SEGMENTS]
    shown = {segment.id for segment in segments} | {None}
    return {
        "segments": [
            {
                "id": segment.id,
                "parent": segment.parent,
                "tokens": len(segment.tokens.token_ids),
                "finish_reason": segment.finish,
                "versions": [_span(span) for span in segment.tokens.versions],
                "kv": group.exports is not None and group.exports.state(segment.id).kv is not None,
            }
            for segment in segments
        ],
        "num_segments": len(group.tree.segments()),
        "growing": [parent for parent in group.growing if parent in shown],
    }


def _span(span: VersionSpan) -> dict[str, Any]:
    return {"version": span.version, "tokens": span.end - span.start}
