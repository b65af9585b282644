"""Which anchors are kept, for whom and how long."""

import asyncio
from pathlib import Path

from engine.kv_types import ExportStatus
from service.kv_reuse.anchors import (
    EVICTION_WINDOW,
    MAX_ANCHORS_PER_CONTEXT,
    Anchor,
    least_used_of_oldest,
)
from service.kv_reuse.kv_distance import DistanceCache
from service.kv_reuse.layout import PromptSpan
from service.kv_reuse.prefix_order import Scope
from tests.service.reuse.pool import SCOPE, a_pool, prompt_of, template


async def test_an_anchor_is_found_by_its_context_once_it_is_written(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        anchor = pool.begun(prompt_of(5, 6))
        assert anchor is not None
        assert pool.find(prompt_of(5, 6)) == []
        pool.commit(anchor.real)
        assert pool.find(prompt_of(7, 8)) == [anchor], "before its group has ended"
        pool.anchors.end(anchor)
        assert pool.find(prompt_of(7, 8, own=9)) == []
        assert pool.find(prompt_of(7)) == []
        assert pool.find(prompt_of(7, 8), Scope("other", None)) == []
        assert pool.find(prompt_of(7, 8), Scope("key", "salt")) == []
        pool.check()


async def test_what_stands_behind_the_last_name_is_of_no_context(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        anchor = pool.made(prompt_of(5))
        assert pool.find([*prompt_of(7)[:2], PromptSpan(token_ids=[9] * 30)]) == [anchor]


async def test_its_segments_stay_with_it(tmp_path: Path) -> None:
    """Though other texts have taken their names' place."""
    with a_pool(tmp_path) as pool:
        anchor = pool.made(prompt_of(5))
        pool.made(prompt_of(6))
        assert pool.store.num_segments == 2
        assert anchor.bases[1].pins == 1
        pool.anchors.forget([anchor])
        assert anchor.bases[1].pins == 0
        pool.check()


async def test_segments_of_new_weights_find_the_room_of_old_anchors(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        pool.made(prompt_of(5))
        pool.epoch = 1
        for kept in pool.bases(prompt_of(6)).values():
            pool.store.unpin(kept, settled=True)
        assert pool.anchors.num_by_outcome["outdated"] == 1
        pool.check()


async def test_what_was_known_may_be_forgotten_while_others_are_compared(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        one, two, three = (pool.bases(prompt_of(text))[1].slot for text in (5, 6, 7))
        distances = DistanceCache(pool.store)
        known = await distances.get_distances([(one, two)])
        comparing = asyncio.create_task(distances.get_distances([(one, two), (one, three)]))
        await asyncio.sleep(0)
        distances._cache.clear()
        assert set(await comparing) == {(one, two), (one, three)}
        assert (await distances.get_distances([(one, two)])) == known
        distances.close()


async def test_all_die_with_the_weights(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        pool.made(prompt_of(5))
        begun = pool.begun(prompt_of(6))
        bases = pool.bases(prompt_of(7))
        pool.epoch = 1
        assert pool.find(prompt_of(5)) == []
        assert pool.anchors.num_anchors == 0 and pool.anchors.num_by_outcome["outdated"] == 2
        assert begun is not None
        pool.commit(begun.real)
        pool.anchors.end(begun)
        assert not pool.anchors.is_missing(SCOPE, template(7), bases), (
            "its segments are of other weights"
        )
        for kept in bases.values():
            pool.store.unpin(kept, settled=True)
        pool.made(prompt_of(8))
        pool.check()
        assert pool.anchors.num_anchors == 1


async def test_of_the_oldest_the_least_used_makes_room(tmp_path: Path) -> None:
    with a_pool(tmp_path, 2**26) as pool:
        anchors = [pool.made(prompt_of(5 + i)) for i in range(MAX_ANCHORS_PER_CONTEXT)]
        pool.anchors.used([a for i, a in enumerate(anchors) if i not in (2, EVICTION_WINDOW)])
        assert least_used_of_oldest(anchors) is anchors[2]
        newest = pool.made(prompt_of(99))
        assert pool.find(prompt_of(1)) == [a for a in anchors if a is not anchors[2]] + [newest]
        assert pool.anchors.num_by_outcome["evicted"] == 1
        pool.check()


async def test_what_is_read_is_freed_when_it_is_let_go(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        anchor = pool.made(prompt_of(5))
        anchor.real.pins += 1
        pool.epoch = 1
        assert pool.find(prompt_of(5)) == []
        before = pool.store.num_bytes
        pool.store.unpin(anchor.real, settled=True)
        assert pool.store.num_bytes < before
        pool.check()


async def test_full_of_anchors_it_drops_one_that_nobody_reads(tmp_path: Path) -> None:
    """Of the context that was asked for longest ago."""
    with a_pool(tmp_path, 2**21) as pool:
        first = pool.made(prompt_of(5, own=1))
        read = pool.made(prompt_of(5, own=3))
        read.real.pins += 1
        owns = range(4, 30)
        made = [pool.made(prompt_of(5, own=own)) for own in owns]
        assert pool.find(prompt_of(5, own=1)) == []
        assert pool.find(prompt_of(5, own=3)) == [read]
        assert pool.find(prompt_of(5, own=owns[-1])) == [made[-1]]
        assert first.real.pins == 0
        read.real.pins -= 1
        pool.check()


async def test_all_of_it_in_use_there_is_no_room(tmp_path: Path) -> None:
    with a_pool(tmp_path, 2**20) as pool:
        pinned: list[Anchor] = []
        while (anchor := pool.begun(prompt_of(5, own=3 + len(pinned)))) is not None:
            pinned.append(anchor)
        assert pinned
        for anchor in pinned:
            pool.commit(anchor.real)
            pool.anchors.end(anchor)
        assert pool.begun(prompt_of(5, own=99)) is not None


async def test_what_was_not_written_is_dropped(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        anchor = pool.begun(prompt_of(5))
        assert anchor is not None
        pool.anchors.end(anchor)
        while pool.anchors._settle_tasks:
            await next(iter(pool.anchors._settle_tasks))
        assert pool.anchors.num_anchors == 0 and pool.anchors.num_by_outcome["failed"] == 1
        pool.check()


async def test_nor_is_one_whose_segment_was_not(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        anchor = pool.made(prompt_of(5))
        base = anchor.bases[1]
        at = base.slot.status_offset
        pool.store.view[at : at + 8] = ExportStatus.FAILED.to_bytes(8, "little")
        base.is_written = False
        assert pool.find(prompt_of(5)) == []
        assert pool.anchors.num_anchors == 0


async def test_the_same_texts_make_one(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        pool.begun(prompt_of(5))
        bases = pool.bases(prompt_of(6))
        assert not pool.anchors.is_missing(SCOPE, template(5), {})
        assert pool.anchors.is_missing(SCOPE, template(6), bases)
        assert pool.anchors.is_missing(SCOPE, template(5, length=61), {})
