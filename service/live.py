"""What goes on just now, as the live page shows it. No prompt, no token, no text."""

from typing import Any

from coppice.wire.rollouts import VersionSpan
from service.group import Group
from service.rollout import Rollout
from service.server import Server

MAX_ROLLOUTS = 20
MAX_GROUPS = 24  # of one rollout
MAX_SAMPLES = 64  # of one group


def snapshot(server: Server) -> dict[str, Any]:
    status = server.status()
    rollouts = server.rollouts.in_flight()
    return {
        "stage": status.stage,
        "paused": status.paused,
        "model": None if status.engine is None else status.engine.model,
        "uptime_seconds": status.uptime_seconds,
        "heartbeat_seconds": server.pulse().age_seconds,
        "samples": {
            "running": status.samples_running,
            "admitted": server.admission.num_samples,
            "limit": server.settings.limits.max_samples_running,
        },
        "versions": [
            {"version": v.label, "sequence": v.sequence, "state": v.state, "num_bytes": v.num_bytes}
            for v in reversed(server.versions.all())
        ],
        "num_rollouts": len(rollouts),
        "rollouts": [_rollout(rollout) for rollout in rollouts[:MAX_ROLLOUTS]],
    }


def _rollout(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "owner": rollout.owner,
        "num_groups": len(rollout.groups),
        "groups": [_group(group) for group in rollout.groups[:MAX_GROUPS]],
    }


def _group(group: Group) -> dict[str, Any]:
    """Of the samples that still run vLLM tells the length when they end."""
    ended = [
        {
            "index": sample.index,
            "tokens": len(sample.token_ids),
            "finish_reason": sample.finish_reason,
            "versions": [_span(span) for span in sample.versions],
        }
        for sample in group.ended[:MAX_SAMPLES]
    ]
    return {
        "index": group.index,
        "n": group.n,
        "prompt_tokens": len(group.prompt_token_ids),
        "max_tokens": group.sampling.max_tokens,
        "running": group.num_running,
        "ended": ended,
    }


def _span(span: VersionSpan) -> dict[str, Any]:
    return {"version": span.version, "tokens": span.end - span.start}
