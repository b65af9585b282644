"""Versions of kept KV blocks, with a pool of plain objects."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.kv_versions.core.kept_blocks import KeptBlocks
from engine.kv_versions.request_option import KEEP_KV_ARG

BLOCK = 4


@dataclass
class Block:
    block_id: int
    block_hash: str | None = None
    is_null: bool = False


@dataclass
class Pool:
    blocks: list[Block] = field(default_factory=lambda: [Block(i) for i in range(8)])
    removed: list[str] = field(default_factory=list)

    def _remove_cached_block_hashes(self, block: Block) -> list[str | None]:
        removed, block.block_hash = [block.block_hash], None
        return removed

    def _emit_block_removed_events(self, removed: list[str]) -> None:
        self.removed += removed


def request(name: str, *, keep: bool = True, max_lag: int | None = None) -> Any:
    extra_args = {KEEP_KV_ARG: {"max_lag": max_lag}} if keep else None
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra_args))


def kept_blocks(*, can_truncate: bool = True) -> tuple[KeptBlocks, Pool]:
    pool = Pool()
    kept = KeptBlocks(pool, can_truncate=can_truncate)
    kept.set_version("v1")
    return kept, pool


def cache(kept: KeptBlocks, pool: Pool, asked: Any, *indices: int) -> list[Block]:
    """Cache blocks of a request, whose ids are their indices."""
    for index in indices:
        pool.blocks[index].block_hash = f"hash-{index}"
        kept.on_cached(asked, [pool.blocks[index]], index, BLOCK)
    return [pool.blocks[index] for index in indices]


def update(
    kept: KeptBlocks, version: str, *running: tuple[str, int, bool], keep: bool = True
) -> set[int]:
    kept.before_update(running)
    blocks = kept.blocks_to_keep(keep=keep)
    kept.set_version(version)
    return blocks


def test_hit_reports_the_versions_of_its_older_blocks() -> None:
    kept, pool = kept_blocks()
    blocks = cache(kept, pool, request("a"), 0, 1)
    assert update(kept, "v2") == {0, 1}
    blocks += cache(kept, pool, request("b"), 2)
    assert update(kept, "v3") == {0, 1, 2}
    blocks += cache(kept, pool, request("c"), 3)
    assert kept.on_lookup(request("d"), [(blocks, BLOCK)], 16) == 16
    assert kept.reports == {"d": [("v1", 8), ("v2", 12)]}
    assert kept.snapshot()["num_reused_tokens"] == 12


def test_blocks_without_the_option_are_not_kept() -> None:
    kept, pool = kept_blocks()
    cache(kept, pool, request("a", keep=False), 0)
    assert update(kept, "v2") == set()


def test_block_filled_across_an_update_counts_as_its_oldest_position() -> None:
    kept, pool = kept_blocks()
    running = request("a")
    blocks = cache(kept, pool, running, 0)
    update(kept, "v2", ("a", 6, False))
    blocks += cache(kept, pool, running, 1, 2)
    assert kept.reports.pop("a") == [("v1", 6)]
    kept.on_lookup(request("b"), [(blocks, BLOCK)], 12)
    assert kept.reports == {"b": [("v1", 8)]}


def test_evicted_block_is_not_kept_under_its_next_hash() -> None:
    kept, pool = kept_blocks()
    cache(kept, pool, request("a"), 0, 1)
    pool.blocks[0].block_hash = "of another request"
    assert update(kept, "v2") == {1}


def test_activation_of_an_earlier_version_renews_its_kv() -> None:
    kept, pool = kept_blocks()
    blocks = cache(kept, pool, request("a"), 0)
    update(kept, "v2")
    blocks += cache(kept, pool, request("a"), 1)
    update(kept, "v1")
    assert kept.on_lookup(request("b"), [(blocks, BLOCK)], 8) == 8
    assert kept.reports == {"b": [("v1", 4), ("v2", 8)]}
    assert [kept.lag(version) for version in ("v1", "v2")] == [0, 1]


def test_hit_ends_before_a_block_beyond_the_lag_and_drops_it() -> None:
    kept, pool = kept_blocks()
    first = cache(kept, pool, request("a"), 1)
    update(kept, "v2")
    blocks = [*cache(kept, pool, request("a"), 0), *first]
    assert kept.on_lookup(request("b", max_lag=0), [(blocks, BLOCK)], 8) == 4
    assert pool.removed == ["hash-1"] and pool.blocks[1].block_hash is None
    assert kept.snapshot()["num_dropped_tokens"] == {"lag": 4}


def test_part_of_a_hit_is_no_hit_with_sliding_windows() -> None:
    kept, pool = kept_blocks(can_truncate=False)
    first = cache(kept, pool, request("a"), 1)
    update(kept, "v2")
    blocks = [*cache(kept, pool, request("a"), 0), *first]
    assert kept.on_lookup(request("b", max_lag=0), [(blocks, BLOCK)], 8) == 0


def test_update_drops_blocks_that_it_makes_too_old() -> None:
    kept, pool = kept_blocks()
    cache(kept, pool, request("a", max_lag=1), 0)
    assert update(kept, "v2") == {0}
    assert update(kept, "v3") == set()
    assert kept.snapshot()["num_dropped_tokens"] == {"lag": 4}


def test_preempted_request_reports_that_its_kv_is_computed_again() -> None:
    kept, _ = kept_blocks()
    update(kept, "v2", ("a", 6, False), ("b", 0, True))
    assert kept.reports == {"a": [("v1", 6)], "b": []}
    kept.reports.clear()
    kept.on_lookup(request("a", keep=False), [((), BLOCK)], 0)
    assert kept.reports == {"a": []}


def test_nothing_is_remembered_of_ended_requests_and_unused_versions() -> None:
    kept, pool = kept_blocks()
    update(kept, "v2", ("a", 6, False))
    kept.on_finished("a")
    update(kept, "v3")
    assert (kept.reports, kept._older_kv, list(kept._updates)) == ({}, {}, ["v2", "v3"])
    cache(kept, pool, request("b"), 0)
    update(kept, "v4", keep=False)
    assert kept.num_kept_tokens() == 0
