"""Requests for trees, and the invariants of every tree."""

from typing import Any

from tests.fake_engine import FakeEngine

BLOCK = 32
PROMPT = [1]


def branching(mode: str = "interval", /, **fields: Any) -> dict[str, Any]:
    small = {"max_leaves": 4, "max_depth": 2}
    if mode == "interval":
        small["interval"] = BLOCK
    return {"mode": mode, **small, **fields}


def tree_request(
    mode: str = "interval",
    /,
    *,
    prompt: list[int] = PROMPT,
    max_tokens: int = 200,
    rest: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    return {
        "groups": [{"prompt": {"token_ids": prompt}}],
        "sampling": {"max_tokens": max_tokens},
        "branching": branching(mode, **fields),
        **(rest or {}),
    }


def path(group: dict[str, Any], segment_id: str) -> list[dict[str, Any]]:
    by_id = {segment["id"]: segment for segment in group["segments"]}
    found = [by_id[segment_id]]
    while found[-1].get("parent"):
        found.append(by_id[found[-1]["parent"]])
    return found[::-1]


def lengths(group: dict[str, Any]) -> list[int]:
    """Lengths of the paths in response tokens."""
    return [sum(len(s["token_ids"]) for s in path(group, leaf)) for leaf in group["leaves"]]


def check_tree(group: dict[str, Any]) -> None:
    """Asserts that the segments form a tree and that its counts match."""
    seen: set[str | None] = {None}
    for segment in group["segments"]:
        assert segment.get("parent") in seen, "a segment before its parent"
        seen.add(segment["id"])
        num_tokens = len(segment["token_ids"])
        assert len(segment["logprobs"]) == num_tokens
        assert sum(span["end"] - span["start"] for span in segment["versions"]) == num_tokens
    parents = {segment.get("parent") for segment in group["segments"]}
    assert set(group["leaves"]) == seen - parents - {None}
    for segment in group["segments"]:
        through = [leaf for leaf in group["leaves"] if segment in path(group, leaf)]
        assert segment["num_leaves"] == len(through) > 0


def check_cuts(group: dict[str, Any], num_prompt_tokens: int) -> None:
    """Asserts that a child finds its whole prompt cached except one token."""
    for segment in group["segments"]:
        if segment["finish_reason"] == "cut":
            above = sum(len(each["token_ids"]) for each in path(group, segment["id"]))
            assert (num_prompt_tokens + above) % BLOCK == 1


def stop_after(engine: FakeEngine, *limits: int) -> None:
    """Stops the running samples, in order, after this many tokens; 0: leaves a sample unchanged."""
    for sample, limit in zip(engine.running.values(), limits, strict=True):
        if limit:
            sample.limit, sample.ends = limit, "stop"
