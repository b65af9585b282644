"""Versions of kept KV blocks, with a pool of plain objects."""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.kv_lifetime.core.kept_blocks import KeptBlocks
from engine.kv_lifetime.keep_option import KEEP_KV_ARG, KeepOption

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


def request(
    name: str,
    *,
    keep: bool = True,
    max_lag: int | None = None,
) -> Any:
    option = KeepOption(max_lag=max_lag)
    extra_args = {KEEP_KV_ARG: option} if keep else None
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra_args))


def kept_blocks() -> tuple[KeptBlocks, Pool]:
    pool = Pool()
    kept = KeptBlocks(pool)
    kept.set_version("v1")
    return kept, pool


def cache(kept: KeptBlocks, pool: Pool, asked: Any, *indices: int) -> list[Block]:
    """Cache blocks of a request, whose ids are their indices, behind those that it finds."""
    if indices[0] and asked.request_id not in kept._older_kv:
        kept.on_lookup(asked, [pool.blocks[: indices[0]]], indices[0] * BLOCK)
        kept.reports.pop(asked.request_id, None)
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


def hit(kept: KeptBlocks, asked: Any, blocks: list[Block]) -> int:
    """Number of blocks that the request finds, where no hash has two blocks."""
    found = list(itertools.takewhile(lambda block: block.block_hash is not None, blocks))
    if kept.drop_too_old(asked, [found]):
        return hit(kept, asked, blocks)
    kept.on_lookup(asked, [found], len(found) * BLOCK)
    return len(found)


def test_hit_reports_the_versions_of_its_older_blocks() -> None:
    kept, pool = kept_blocks()
    blocks = cache(kept, pool, request("a"), 0, 1)
    assert update(kept, "v2") == {0, 1}
    blocks += cache(kept, pool, request("b"), 2)
    assert update(kept, "v3") == {0, 1, 2}
    blocks += cache(kept, pool, request("c"), 3)
    for _ in range(2):  # the first time, the request cannot be scheduled
        assert hit(kept, request("d"), blocks) == 4
    assert kept.reports == {"d": [("v1", 8), ("v2", 12), ("v3", 16)]}
    assert kept.snapshot()["num_reused_tokens"] == 0
    kept.on_allocated("d")
    assert kept.snapshot()["num_reused_tokens"] == 16


def test_blocks_without_the_option_are_not_kept() -> None:
    kept, pool = kept_blocks()
    cache(kept, pool, request("a", keep=False), 0)
    assert update(kept, "v2") == set()


def test_hit_of_a_block_filled_across_an_update_reports_its_versions_by_position() -> None:
    kept, pool = kept_blocks()
    running = request("a")
    blocks = cache(kept, pool, running, 0)
    update(kept, "v2", ("a", 6, False))
    blocks += cache(kept, pool, running, 1, 2)
    assert kept.reports.pop("a") == [("v1", 6)]
    assert hit(kept, request("b"), blocks) == 3
    assert kept.reports == {"b": [("v1", 6), ("v2", 12)]}
    update(kept, "v3", ("b", 14, False))
    assert kept.reports.pop("b") == [("v1", 6), ("v2", 14)]
    assert hit(kept, request("c", max_lag=2), blocks) == 3
    assert hit(kept, request("d", max_lag=1), blocks) == 0, "it is as old as its oldest position"


def test_block_behind_one_that_was_filled_across_an_update_elsewhere_is_dropped() -> None:
    """Two samples with the same tokens, one of which is a position behind the other."""
    kept, pool = kept_blocks()
    running = [request("a"), request("b")]
    update(kept, "v2", ("a", 5, False), ("b", 6, False))
    first = cache(kept, pool, running[0], 0, 1)
    pool.blocks[5].block_hash = "hash-2"
    kept.on_cached(running[1], [pool.blocks[5]], 2, BLOCK)
    own = cache(kept, pool, running[0], 2)
    assert hit(kept, request("c"), [*first, pool.blocks[5]]) == 2
    assert hit(kept, request("c"), [*first, *own]) == 3
    assert kept.reports["c"] == [("v1", 5), ("v2", 12)]


def test_hit_in_several_groups_reports_its_versions_by_position() -> None:
    """Blocks of different sizes, of which the second group has only those in its window."""
    kept, pool = kept_blocks()
    running = request("a")
    update(kept, "v2", ("a", 5, False))
    update(kept, "v3", ("a", 7, False))
    small = cache(kept, pool, running, 0, 1, 2, 3)
    kept.reports.clear()
    large = pool.blocks[4:6]
    for index, block in enumerate(large):
        block.block_hash = f"large-{index}"
    kept.on_cached(running, large, 0, 2 * BLOCK)
    windowed = [Block(7, is_null=True), large[1]]
    groups = [small, windowed]
    assert not kept.drop_too_old(request("b"), groups)
    kept.on_lookup(request("b"), groups, 4 * BLOCK)
    kept.on_lookup(request("c"), [windowed], 4 * BLOCK)
    versions = [("v1", 5), ("v2", 7), ("v3", 16)]
    assert kept.reports == {"b": versions, "c": versions}


def test_groups_whose_blocks_have_different_versions_are_dropped() -> None:
    """After the first block of one group was evicted, all is computed again."""
    kept, pool = kept_blocks()
    cache(kept, pool, request("a"), 0, 1)
    update(kept, "v2")
    kept.on_removed(pool.blocks[0])
    again = pool.blocks[4:6]
    for index, block in enumerate(again):
        block.block_hash = f"hash-{index}"
    kept.on_cached(request("b"), again, 0, BLOCK)
    windowed = [Block(7, is_null=True), pool.blocks[1]]
    assert kept.drop_too_old(request("c"), [again, windowed])
    assert again[1].block_hash is pool.blocks[1].block_hash is None
    assert not kept.drop_too_old(request("c"), [again[:1], []])
    assert kept.snapshot()["num_dropped_tokens"] == {"prefix_recomputed": 2 * BLOCK}


def test_evicted_block_is_not_kept_under_its_next_hash() -> None:
    kept, pool = kept_blocks()
    cache(kept, pool, request("a"), 0, 1)
    pool.blocks[0].block_hash = "of another request"
    assert update(kept, "v2") == {1}


def test_kv_of_a_version_that_is_activated_again_is_not_renewed() -> None:
    """Its label may be that of other weights by now."""
    kept, pool = kept_blocks()
    blocks = cache(kept, pool, request("a"), 0)
    update(kept, "v2")
    blocks += cache(kept, pool, request("b"), 1)
    update(kept, "v1")
    assert hit(kept, request("c"), blocks) == 2
    assert kept.reports == {"c": [("v1", 4), ("v2", 8)]}
    assert hit(kept, request("d", max_lag=2), blocks) == 2
    assert hit(kept, request("e", max_lag=1), blocks) == 0


def test_hit_ends_before_a_block_beyond_the_lag_and_drops_it() -> None:
    kept, pool = kept_blocks()
    first = cache(kept, pool, request("a"), 1)
    update(kept, "v2")
    blocks = [*cache(kept, pool, request("b"), 0), *first]
    assert hit(kept, request("c", max_lag=0), blocks) == 1
    assert pool.removed == ["hash-1"] and pool.blocks[1].block_hash is None
    assert kept.snapshot()["num_dropped_tokens"] == {"lag": 4}


def test_block_is_as_old_as_the_oldest_kv_that_it_attended_to() -> None:
    kept, pool = kept_blocks()
    running = request("a")
    prefix = cache(kept, pool, running, 0)
    update(kept, "v2", ("a", 5, False))
    suffix = cache(kept, pool, running, 1, 2)
    kept.reports.clear()
    assert hit(kept, request("b"), [*prefix, *suffix]) == 3
    assert kept.reports == {"b": [("v1", 5), ("v2", 12)]}
    suffix += cache(kept, pool, request("b"), 3)  # after a hit of such blocks
    assert hit(kept, request("c", max_lag=0), suffix[2:]) == 0
    assert hit(kept, request("d", max_lag=0), suffix[1:]) == 0
    assert pool.removed == ["hash-3", "hash-2"]


def test_report_has_the_age_of_the_oldest_kv_at_its_output() -> None:
    kept, pool = kept_blocks()
    blocks = cache(kept, pool, request("a"), 0)
    update(kept, "v2")
    hit(kept, request("b"), blocks)
    update(kept, "v3", ("b", 6, False))
    assert kept.reports.pop("b") == [("v1", 4), ("v2", 6)]
    assert "b" not in kept.reports


def test_update_drops_the_blocks_that_attended_to_kv_that_it_makes_too_old() -> None:
    kept, pool = kept_blocks()
    running = request("a", max_lag=1)
    cache(kept, pool, running, 0)
    update(kept, "v2", ("a", 4, False))
    cache(kept, pool, running, 1)
    assert update(kept, "v3") == set()


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
    hit(kept, request("a", keep=False), [])
    assert kept.reports == {"a": []}


def test_nothing_is_remembered_of_ended_requests_and_unused_versions() -> None:
    kept, pool = kept_blocks()
    update(kept, "v2", ("a", 6, False))
    kept.on_finished("a")
    update(kept, "v3")
    known = sorted(kept._labels.values())
    assert (kept.reports, kept._older_kv, known) == ({}, {}, ["v2", "v3"])
    cache(kept, pool, request("b"), 0)
    update(kept, "v4", keep=False)
    assert kept.snapshot()["num_kept_tokens"] == 0


def test_number_of_kept_tokens_follows_the_cache() -> None:
    kept, pool = kept_blocks()
    cache(kept, pool, request("a"), 0, 1, 2)
    cache(kept, pool, request("a"), 2)
    kept.on_removed(pool.blocks[0])
    kept.on_removed(pool.blocks[7])
    assert kept.snapshot()["num_kept_tokens"] == 2 * BLOCK
    kept.on_reset()
    assert kept.snapshot()["num_kept_tokens"] == 0
    assert kept.snapshot()["num_dropped_tokens"] == {"reset": 2 * BLOCK}


def test_block_behind_recomputed_kv_is_dropped() -> None:
    """The KV that it attended to is no longer found, so the versions of a hit would be wrong."""
    kept, pool = kept_blocks()
    blocks = cache(kept, pool, request("a"), 0, 1)
    update(kept, "v2")
    assert hit(kept, request("b", max_lag=0), blocks[:1]) == 0
    again = [*cache(kept, pool, request("b"), 0), blocks[1]]
    assert hit(kept, request("c"), again) == 1
    assert kept.snapshot()["num_dropped_tokens"] == {"lag": BLOCK, "prefix_recomputed": BLOCK}


def test_block_behind_older_kv_than_it_attended_to_is_dropped() -> None:
    kept, pool = kept_blocks()
    old = cache(kept, pool, request("a"), 0)
    update(kept, "v2")
    pool.blocks[4].block_hash = "hash-0"
    kept.on_cached(request("b"), [pool.blocks[4]], 0, BLOCK)
    pool.blocks[5].block_hash = "hash-1"
    kept.on_cached(request("b"), [pool.blocks[5]], 1, BLOCK)
    assert hit(kept, request("c"), [pool.blocks[4], pool.blocks[5]]) == 2
    assert hit(kept, request("c"), [*old, pool.blocks[5]]) == 1


def test_blocks_of_a_sample_across_updates_are_found_together() -> None:
    kept, pool = kept_blocks()
    running = request("a")
    blocks = cache(kept, pool, running, 0)
    update(kept, "v2", ("a", 5, False))
    update(kept, "v3", ("a", 7, False))
    blocks += cache(kept, pool, running, 1)
    update(kept, "v4", ("a", 9, False))
    blocks += cache(kept, pool, running, 2, 3)
    assert hit(kept, request("b"), blocks) == 4
    assert kept.reports["b"] == [("v1", 5), ("v2", 7), ("v3", 9), ("v4", 16)]
