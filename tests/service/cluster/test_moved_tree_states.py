"""States of trees that do not fit their request are refused, and leave nothing behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from service.cluster.in_memory import InMemoryRegistry
from service.moves.state import state_of
from service.rollouts.rollout import Rollout
from tests.service.cluster.test_moved_trees import grown, grown_by, suspended_now
from tests.service.cluster.test_moves import engine_of, post, replicas, see_each_other
from tests.service.test_rollouts import body, group, running_samples
from tests.service.trees import BLOCK, tree_request
from tests.serving import Served

pytestmark = pytest.mark.slow

PROMPT = [1]
State = dict[str, Any]
Change = Callable[[State], Any]
INTERVAL = tree_request(
    prompt=PROMPT, max_depth=3, max_leaves=8, rest={"weights": {"exact_version": "v0"}}
)
ENTROPY = tree_request(
    "entropy",
    prompt=PROMPT,
    first_split=8,
    max_leaves=6,
    rest={"return_support": True, "logprobs_mode": "raw_logprobs"},
)


@asynccontextmanager
async def state_and_receiver(
    tmp_path: Path, request: dict[str, Any], num_steps: int, **limits: int
) -> AsyncIterator[tuple[State, Served]]:
    """State of a tree with segments and paths, and a replica with these limits to receive it."""
    states = list[State]()
    async with replicas(tmp_path, InMemoryRegistry(), limits=limits) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, request))
        await grown_by(a, num_steps)

        async def capture(rollout: Rollout) -> None:
            state = await state_of(rollout, source=a.server.cluster.own_id, version="v0")
            states.append(json.loads(state.model_dump_json()))

        await suspended_now(a, capture)
        yield states[0], b
        await grown(a, calling)


async def is_refused(b: Served, state: State, *codes: str) -> str:
    response = await b.http.post("/v1/moves", json=state)
    assert response.json()["code"] in (codes or ("invalid_request",)), response.text
    assert (b.server.rollouts.num_running, b.server.admission.num_samples) == (0, 0)
    assert (len(b.server.rollouts.keys), engine_of(b).submitted) == (0, [])
    return str(response.json()["detail"])


def segments(state: State) -> list[dict[str, Any]]:
    return [each["segment"] for each in state["records"] if each["type"] == "segment"]


def tree(state: State) -> dict[str, Any]:
    moved: dict[str, Any] = state["groups"][0]["tree"]
    return moved


def path(state: State) -> dict[str, Any]:
    first: dict[str, Any] = tree(state)["paths"][0]
    return first


def tokens(state: State) -> dict[str, Any]:
    found: dict[str, Any] = path(state)["segment"]
    return found


def with_tokens(state: State, number: int) -> None:
    """Give a path this number of tokens."""
    tokens(state)["token_ids"] = [1] * number
    tokens(state)["logprobs"] = [-1.0] * number
    tokens(state)["versions"] = [{"version": "v0", "start": 0, "end": number}]
    tokens(state)["kv_versions"] = []


def with_one_path_of_more_leaves(state: State) -> None:
    """Give the leaves of a path to its sibling, so that their number stays the same."""
    first, second, *_ = tree(state)["paths"]
    assert first["segment"]["parent"] == second["segment"]["parent"]
    first["num_leaves"] += second["num_leaves"]
    tree(state)["paths"].remove(second)


def without_paths_of_a_segment(state: State) -> None:
    parent = tokens(state)["parent"]
    paths = tree(state)["paths"]
    tree(state)["paths"] = [each for each in paths if each["segment"]["parent"] != parent]


def with_older_tokens(state: State) -> None:
    tokens(state)["versions"][0]["version"] = "older"


CHANGES: dict[str, Change] = {
    "other blocks": lambda s: tree(s).update(block_size=16),
    "a name is missing": lambda s: tree(s)["segment_names"].pop(),
    "an invalid name": lambda s: tree(s)["segment_names"].__setitem__(0, "/1"),
    "a repeated name": lambda s: tree(s)["segment_names"].__setitem__(1, "/1+0"),
    "a name of another path": lambda s: tree(s)["segment_names"].__setitem__(0, "/1+0/1+0"),
    "a name after the first": lambda s: tree(s)["segment_names"].__setitem__(0, "/1+1"),
    "an id twice": lambda s: segments(s)[1].update(id="0.0"),
    "an id of another group": lambda s: segments(s)[1].update(id="1.1"),
    "an id that is too high": lambda s: segments(s)[1].update(id="0.9"),
    "an id with a zero": lambda s: segments(s)[1].update(id="0.01"),
    "an unknown parent": lambda s: segments(s)[1].update(parent="0.7"),
    "a depth": lambda s: segments(s)[1].update(depth=0),
    "no cut above a path": lambda s: [each.update(finish_reason="stop") for each in segments(s)],
    "a segment without a logprob": lambda s: segments(s)[0]["logprobs"].pop(),
    "a segment with an unknown token": lambda s: segments(s)[0]["token_ids"].__setitem__(0, 256),
    "a segment without versions": lambda s: segments(s)[0].update(versions=[]),
    "no paths": lambda s: tree(s).update(paths=[]),
    "no tree": lambda s: s["groups"][0].pop("tree"),
    "samples": lambda s: s["groups"][0].update(samples=[tokens(s) | {"index": 0}]),
    "given tokens": lambda s: s["groups"][0].update(num_given_tokens=[0]),
    "a path's depth": lambda s: tokens(s).update(depth=1),
    "a path's parent": lambda s: tokens(s).update(parent="0.7"),
    "a path's name": lambda s: tokens(s).update(id="/1+0/x"),
    "a path's name in other digits": lambda s: tokens(s).update(id="/1+0/\u0661"),
    "a path twice": lambda s: tree(s)["paths"].append(path(s)),
    "a negative token": lambda s: tokens(s)["token_ids"].__setitem__(0, -1),
    "another version": with_older_tokens,
    "all tokens": lambda s: with_tokens(s, path(s)["max_tokens"]),
    "another cut": lambda s: path(s).update(max_tokens=path(s)["max_tokens"] - 1),
    "a cut by the budget": lambda s: path(s).update(is_budget_limited=True),
    "shorter": lambda s: path(s).update(max_tokens=20, is_cut=False, num_leaves=1),
    "not shorter by the budget": lambda s: path(s).update(
        max_tokens=200 - sum(len(each["token_ids"]) for each in segments(s)[:1]),
        is_cut=False,
        num_leaves=1,
        is_budget_limited=True,
    ),
    "no cut": lambda s: path(s).update(is_cut=False),
    "too long": lambda s: path(s).update(max_tokens=400, is_cut=False, num_leaves=1),
    "too many leaves": lambda s: path(s).update(num_leaves=3),
    "too many leaves for its depth": with_one_path_of_more_leaves,
    "no path after a cut": without_paths_of_a_segment,
    "too many tokens": lambda s: s["request"]["branching"].update(max_new_tokens_total=100),
    "entropies": lambda s: tokens(s).update(entropy=[0.0] * len(tokens(s)["token_ids"])),
    "external": lambda s: s["request"]["branching"].update(
        {"mode": "external", "interval": 128, "min_gap": 32}
    ),
    "no branching": lambda s: s["request"].pop("branching"),
}
TABLES = ("entropy", "support", "raw_logprobs")


@pytest.mark.parametrize("kind", CHANGES)
async def test_tree_that_does_not_fit_its_request_is_refused(tmp_path: Path, kind: str) -> None:
    async with state_and_receiver(tmp_path, INTERVAL, 6) as (state, b):
        assert [len(tree(state)[name]) for name in ("segment_names", "paths")] == [2, 4]
        changed = deepcopy(state)
        CHANGES[kind](changed)
        assert changed != state
        await is_refused(b, changed)
        response = await b.http.post("/v1/moves", json=state)
        assert response.status_code == 201, response.text
        await running_samples(b, 4)
        engine_of(b).instant = True
        engine_of(b).step(250)


async def test_tree_with_other_blocks_has_a_clear_refusal(tmp_path: Path) -> None:
    async with state_and_receiver(tmp_path, INTERVAL, 6) as (state, b):
        tree(state)["block_size"] = 16
        detail = await is_refused(b, state)
        assert "blocks of 16 tokens" in detail and str(BLOCK) in detail


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("part", ["segment", "path"])
async def test_tree_without_the_tables_of_its_request_is_refused(
    tmp_path: Path, name: str, part: str
) -> None:
    async with state_and_receiver(tmp_path, ENTROPY, 32) as (state, b):
        answer = tokens(state) if part == "path" else segments(state)[0]
        assert answer["token_ids"]
        answer[name] = None
        await is_refused(b, state)


@pytest.mark.parametrize("name", ["entropy", "raw_logprobs"])
async def test_tree_with_too_short_tables_is_refused(tmp_path: Path, name: str) -> None:
    async with state_and_receiver(tmp_path, ENTROPY, 32) as (state, b):
        tokens(state)[name].pop()
        await is_refused(b, state)


async def test_second_piece_of_a_path_needs_the_first_above_it(tmp_path: Path) -> None:
    async with state_and_receiver(tmp_path, ENTROPY, 32) as (state, b):
        names = tree(state)["segment_names"]
        (index,) = [i for i, name in enumerate(names) if name.endswith("+1")][:1]
        names[index] = names[index].removesuffix("1") + "2"
        await is_refused(b, state)


def with_paths(state: State, number: int) -> None:
    """Give the first segment of a tree more paths, each with one leaf and all tokens to come."""
    one = path(state) | {"num_leaves": 1, "is_cut": False, "max_tokens": 200 - BLOCK}
    parent, depth = tokens(state)["parent"], tokens(state)["depth"]
    empty: dict[str, Any] = {"token_ids": [], "logprobs": [], "versions": [], "kv_versions": []}
    tree(state)["paths"] = [
        one | {"segment": tokens(state) | empty | {"id": f"/1+0/{index}", "depth": depth}}
        for index in range(1, number + 1)
    ]
    tree(state)["segment_names"], state["records"] = ["/1+0"], state["records"][:1]
    assert segments(state)[0]["id"] == parent
    state["request"]["branching"]["max_new_tokens_total"] = 2**20


async def test_number_of_paths_is_limited_by_the_leaves_of_the_request(tmp_path: Path) -> None:
    async with state_and_receiver(tmp_path, INTERVAL, 6) as (state, b):
        with_paths(state, 9)
        assert "more than 8 leaves" in await is_refused(b, state)


async def test_running_samples_and_leaves_of_moved_trees_have_one_limit(tmp_path: Path) -> None:
    async with state_and_receiver(tmp_path, INTERVAL, 6, max_samples_running=10) as (state, b):
        calling = asyncio.create_task(post(b, body(group(1, n=3))))
        await running_samples(b, 3)
        response = await b.http.post("/v1/moves", json=state)
        assert (response.status_code, response.json()["code"]) == (503, "overloaded")
        assert b.server.admission.num_samples == 3
        engine_of(b).step(4)
        await calling
        response = await b.http.post("/v1/moves", json=state)
        assert (response.status_code, b.server.admission.num_samples) == (201, 8)
        engine_of(b).instant = True
        engine_of(b).step(250)


async def test_leaves_of_a_moved_tree_are_limited_per_request(tmp_path: Path) -> None:
    async with state_and_receiver(tmp_path, INTERVAL, 6, max_samples_per_request=8) as (state, b):
        state["request"]["branching"]["max_leaves"] = 9
        assert "9 samples" in await is_refused(b, state)


@pytest.mark.parametrize("finish", ["length", "cut"])
async def test_number_of_segments_is_limited_by_the_request(tmp_path: Path, finish: str) -> None:
    """Also those of an ended tree, whose request has no further paths to check."""
    async with state_and_receiver(tmp_path, INTERVAL, 6) as (state, b):
        request = state["request"]
        request["groups"] *= 2
        request["branching"]["max_new_tokens_total"] = 1000
        one = segments(state)[0] | {"token_ids": [], "logprobs": [], "versions": []}
        one |= {"finish_reason": finish, "parent": None, "depth": 1, "kv_versions": []}
        number = 9 if finish == "length" else 1001
        state["records"] += [
            {"type": "segment", "group": 1, "segment": one | {"id": f"1.{index}"}}
            for index in range(number)
        ]
        head = {"id": "1", "index": 1, "outcome": "done", "leaves": []}
        head |= {"num_prompt_tokens": 1, "num_cached_tokens": 0}
        state["records"].append({"type": "group", "group": head})
        detail = await is_refused(b, state)
        assert ("more than 8" if finish == "length" else "too many segments") in detail
