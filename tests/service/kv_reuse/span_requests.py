"""Requests with prompt spans, over the fake engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fake_engine import FakeEngine
from tests.serving import Served, serving

TOOL, TALE = [5] * 70, [6] * 60
OWN, ASK = [1] * 40, [2] * 4


def span(token_ids: list[int], name: str | None = None) -> dict[str, Any]:
    return {"token_ids": token_ids, **({} if name is None else {"cache_key": name})}


def request_with_spans(*spans: dict[str, Any], n: int = 2, **rest: Any) -> dict[str, Any]:
    group = {"prompt": {"spans": list(spans)}, "n": n}
    return {"groups": [group], "sampling": {"max_tokens": 4}, **rest}


def placed(own: list[int] = OWN, **rest: Any) -> dict[str, Any]:
    """Two spans between unnamed texts: 64 tokens, 46 spliced, 18, 42 spliced, 4."""
    return request_with_spans(
        span(own),
        span(TOOL, "tool"),
        span(TALE, "tale"),
        span(ASK),
        **{"kv_reuse": {"mode": "splice", "recompute_tokens": 8}, **rest},
    )


def predicted(tool: int = 5, tale: int = 6, own: list[int] = OWN, **rest: Any) -> dict[str, Any]:
    """Two spans between unnamed texts; the text of each is one token repeated."""
    return request_with_spans(
        span(own),
        span([tool] * 70, "tool"),
        span([3] * 4),
        span([tale] * 60, "tale"),
        span(ASK),
        **{"kv_reuse": {"mode": "predict"}, **rest},
    )


@asynccontextmanager
async def reusing(
    engine: FakeEngine, tmp_path: Path, *, spans_bytes: int = 2**20, **sections: Any
) -> AsyncIterator[Served]:
    kv = {"spans_bytes": spans_bytes, "directory": tmp_path}
    async with serving(engine, tmp_path, kv=kv, **sections) as served:
        yield served
        kv_reuse = served.server.kv_reuse
        spans = kv_reuse.spans
        spans.check()
        kv_reuse.observations.check()
        contexts = kv_reuse.observations._contexts.values()
        observed = (entry for there in contexts for each in there for entry in each.entries())
        taken = sum(entry.extent.num_bytes for entry in {*spans._entries.values(), *observed})
        assert spans.num_bytes == taken, "a chain's room was not given back"


async def post_rollout(served: Served, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = await served.http.post("/v1/rollouts", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    [group] = answer.json()["groups"]
    return dict(group)
