"""Load decisions per request, against hand-written cases, without an engine and on a fake clock."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.kv_transfer.core.load_planner import MAX_WAIT_SECONDS, LoadPlanner
from engine.types.kv import ExportSlot, KvLoad, LoadPiece, ObservedKv
from tests.engine.kv_transfer.test_loader_step import FORM

BLOCK = FORM.block_size


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Request:
    """The attributes of vLLM's request that the planner reads.

    A block's hash encodes its number.
    """

    def __init__(self, name: str, num_tokens: int) -> None:
        self.request_id, self.num_tokens = name, num_tokens
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self._block_hasher = _numbers
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes += self._block_hasher(self)


def _numbers(request: Request) -> list[bytes]:
    return [bytes([i]) for i in range(len(request.block_hashes), request.num_tokens // BLOCK)]


def piece(name: str, start: int, num_tokens: int) -> LoadPiece:
    source = ExportSlot(
        arena=Path("/arena"), offset=0, status_offset=0, num_tokens=num_tokens, name=name
    )
    return LoadPiece(source=source, token_offset=0, num_tokens=num_tokens, start=start, shift=start)


LOAD = KvLoad(
    chain="chain",
    num_requests=1,
    exact_tokens=32,
    pieces=(piece("a", 32, 20), piece("b", 64, 16), piece("c", 80, 9)),
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def planner(clock: Clock) -> Iterator[LoadPlanner]:
    planner = LoadPlanner(FORM, clock=clock)
    for name in "abc":
        planner.on_exported(name)
    yield planner


def added(planner: LoadPlanner, name: str, num_tokens: int, load: KvLoad = LOAD) -> Any:
    request = Request(name, num_tokens)
    planner.add(request, load)
    return request


@pytest.mark.parametrize(
    ("num_cached", "matched"),
    [(0, 0), (16, 0), (32, 20), (48, 4), (64, 25), (80, 9), (96, 0)],
)
def test_spliced_tokens_directly_after_cached_ones_are_claimed(
    planner: LoadPlanner, num_cached: int, matched: int
) -> None:
    assert planner.match(added(planner, "r", 100), num_cached) == matched


def test_adjacent_pieces_are_loaded_together(planner: LoadPlanner) -> None:
    request = added(planner, "r", 100)
    blocks = SimpleNamespace(get_block_ids=lambda: (list(range(10, 20)),))
    planner.match(request, 64)
    planner.on_allocated(request, blocks, 25)
    [job] = planner.take_jobs()
    assert [piece.source.name for piece in job.pieces] == ["b", "c"]
    assert job.block_ids == (14, 15)
    assert planner.take_jobs() == ()
    planner.forget("r")
    assert planner.num_pending == 0


def test_pieces_may_meet_within_a_block(planner: LoadPlanner) -> None:
    load = replace(LOAD, pieces=(piece("a", 32, 20), piece("b", 52, 20)))
    assert planner.match(added(planner, "r", 100, load), 32) == 40


def test_prediction_is_claimed_only_if_all_its_sources_are_known(
    planner: LoadPlanner,
) -> None:
    observed = ObservedKv(
        real=piece("b", 0, 40).source,
        token_offset=7,
        shift=3,
        base=piece("d", 0, 40).source,
        base_token_offset=2,
    )
    load = replace(LOAD, pieces=(replace(piece("a", 32, 20), observations=(observed,)),))
    request = added(planner, "r", 100, load)
    assert planner.match(request, 32) == 0
    planner.on_exported("d")
    assert planner.match(request, 48) == 4
    planner.on_allocated(request, SimpleNamespace(get_block_ids=lambda: (list(range(10, 20)),)), 4)
    [job] = planner.take_jobs()
    [taken] = job.pieces
    [moved] = taken.observations
    assert (taken.token_offset, moved.token_offset, moved.base_token_offset, moved.shift) == (
        16,
        23,
        18,
        3,
    )
    assert taken.prefix_until(50).num_tokens == 2


def test_one_token_is_left_to_prefill(planner: LoadPlanner) -> None:
    assert planner.match(added(planner, "r", 89), 64) == 16


def test_kv_of_other_weights_is_not_claimed(planner: LoadPlanner) -> None:
    request = added(planner, "r", 100)
    planner.start_epoch()
    assert planner.match(request, 32) == 0
    planner.on_exported("b")
    assert planner.match(request, 64) == 16


def test_chain_waits_until_all_its_requests_have_arrived(planner: LoadPlanner) -> None:
    load = replace(LOAD, num_requests=3)
    first = added(planner, "first", 32, load)
    second = added(planner, "second", 64, load)
    assert [planner.match(r, n) for r, n in ((first, 0), (second, 32))] == [None, None]
    added(planner, "third", 100, load)
    assert [planner.match(r, n) for r, n in ((first, 0), (second, 32))] == [0, 20]


def test_incomplete_chain_waits_only_until_its_timeout(planner: LoadPlanner, clock: Clock) -> None:
    """Also if a part of it was aborted and the rest arrives later."""
    load = replace(LOAD, num_requests=3)
    first = added(planner, "first", 64, load)
    clock.now = MAX_WAIT_SECONDS
    assert planner.match(first, 32) == 20
    planner.forget("first")
    assert planner.num_pending == 0
    second = added(planner, "second", 64, load)
    assert planner.match(second, 32) is None
    clock.now *= 2
    assert planner.match(second, 32) == 20


def test_timeout_applies_to_a_whole_chain_at_once(planner: LoadPlanner, clock: Clock) -> None:
    """However long a step takes to query all of it: later links depend on the first."""
    load = replace(LOAD, num_requests=3)
    first = added(planner, "first", 32, load)
    second = added(planner, "second", 64, load)
    assert planner.match(first, 0) is None
    clock.now = MAX_WAIT_SECONDS
    assert planner.match(second, 0) is None
    assert [planner.match(r, n) for r, n in ((first, 0), (second, 32))] == [0, 20]


def test_blocks_before_the_first_splice_are_shared(planner: LoadPlanner) -> None:
    """The others are private to the chain, including those of its response."""
    one, other = added(planner, "one", 80), added(planner, "other", 100)
    foreign = added(planner, "foreign", 80, replace(LOAD, chain="another"))
    plain = [bytes([i]) for i in range(6)]
    one.num_tokens = 96
    one.update_block_hashes()
    for request in (one, other, foreign):
        assert request.block_hashes[:2] == plain[:2]
        assert not set(request.block_hashes[2:]) & set(plain)
    assert one.block_hashes[2:5] == other.block_hashes[2:5]
    assert not set(one.block_hashes[2:]) & set(foreign.block_hashes[2:])


def test_exact_blocks_that_are_loaded_are_private_too(planner: LoadPlanner) -> None:
    """A load may fail after its blocks were hashed. Hashes of a running request never change."""
    load = replace(LOAD, num_requests=3, exact_tokens=96)
    runs, first, second = (added(planner, name, 112, load) for name in ("runs", "one", "two"))
    runs.num_computed_tokens = 112
    plain = [bytes([i]) for i in range(7)]
    assert all(request.block_hashes[:6] == plain[:6] for request in (runs, first, second))
    assert planner.match(first, 64) == 25
    assert runs.block_hashes[:6] == plain[:6]
    assert first.block_hashes == second.block_hashes
    assert first.block_hashes[:4] == plain[:4]
    assert not set(first.block_hashes[4:]) & set(plain)
    prefix_until = list(second.block_hashes)
    assert planner.match(second, 96) == 0 and second.block_hashes == prefix_until
