"""Observation retention: ownership, lifetime and eviction."""

import asyncio
from pathlib import Path

from coppice.wire.rollouts import PromptSpan
from engine.types.kv import ExportStatus
from service.kv.spans.observations import (
    EVICTION_WINDOW,
    MAX_OBSERVATIONS_PER_CONTEXT,
    Observation,
    least_used_of_oldest,
)
from service.kv.spans.prediction_sources import DistanceCache
from service.kv.spans.prompt_template import Scope
from tests.service.kv_reuse.observation_pool import SCOPE, a_pool, prompt_of, template


async def test_written_observation_is_found_by_its_context(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        observed = pool.begun(prompt_of(5, 6))
        assert observed is not None
        assert pool.find(prompt_of(5, 6)) == []
        pool.commit(observed.real)
        assert pool.find(prompt_of(7, 8)) == [observed], "before its group has ended"
        pool.observations.end(observed)
        assert pool.find(prompt_of(7, 8, own=9)) == []
        assert pool.find(prompt_of(7)) == []
        assert pool.find(prompt_of(7, 8), Scope("other", None)) == []
        assert pool.find(prompt_of(7, 8), Scope("key", "salt")) == []
        pool.check()


async def test_text_after_the_last_name_is_not_part_of_the_context(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        observed = pool.made(prompt_of(5))
        assert pool.find([*prompt_of(7)[:2], PromptSpan(token_ids=[9] * 30)]) == [observed]


async def test_spans_are_retained_with_their_observation(tmp_path: Path) -> None:
    """Even when other texts have replaced them under their names."""
    with a_pool(tmp_path) as pool:
        observed = pool.made(prompt_of(5))
        pool.made(prompt_of(6))
        assert pool.index.num_spans == 2
        assert observed.bases[1].pins == 1
        pool.observations.forget([observed])
        assert observed.bases[1].pins == 0
        pool.check()


async def test_spans_of_new_weights_evict_observations_of_old_weights(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        pool.made(prompt_of(5))
        pool.epoch = 1
        for kept in pool.bases(prompt_of(6)).values():
            pool.store.unpin(kept)
        assert pool.observations.num_by_outcome["outdated"] == 1
        pool.check()


async def test_distance_cache_may_be_cleared_during_a_comparison(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        one, two, three = (pool.bases(prompt_of(text))[1].slot for text in (5, 6, 7))
        distances = DistanceCache(pool.index)
        known = await distances.get_distances([(one, two)])
        comparing = asyncio.create_task(distances.get_distances([(one, two), (one, three)]))
        await asyncio.sleep(0)
        distances._distances.clear()
        assert set(await comparing) == {(one, two), (one, three)}
        assert (await distances.get_distances([(one, two)])) == known
        distances.close()


async def test_weights_change_evicts_all_entries(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        pool.made(prompt_of(5))
        begun = pool.begun(prompt_of(6))
        bases = pool.bases(prompt_of(7))
        pool.epoch = 1
        assert pool.find(prompt_of(5)) == []
        assert (
            pool.observations.num_observations == 0
            and pool.observations.num_by_outcome["outdated"] == 2
        )
        assert begun is not None
        pool.commit(begun.real)
        pool.observations.end(begun)
        assert not pool.observations.is_missing(SCOPE, template(7), bases), (
            "its spans are of other weights"
        )
        for kept in bases.values():
            pool.store.unpin(kept)
        pool.made(prompt_of(8))
        pool.check()
        assert pool.observations.num_observations == 1


async def test_least_used_of_the_oldest_observations_is_evicted(tmp_path: Path) -> None:
    with a_pool(tmp_path, 2**26) as pool:
        observations = [pool.made(prompt_of(5 + i)) for i in range(MAX_OBSERVATIONS_PER_CONTEXT)]
        pool.observations.used(
            [a for i, a in enumerate(observations) if i not in (2, EVICTION_WINDOW)]
        )
        assert least_used_of_oldest(observations) is observations[2]
        newest = pool.made(prompt_of(99))
        assert pool.find(prompt_of(1)) == [a for a in observations if a is not observations[2]] + [
            newest
        ]
        assert pool.observations.num_by_outcome["evicted"] == 1
        pool.check()


async def test_leased_entry_is_freed_on_release(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        observed = pool.made(prompt_of(5))
        observed.real.pins += 1
        pool.epoch = 1
        assert pool.find(prompt_of(5)) == []
        before = pool.index.num_bytes
        pool.store.unpin(observed.real)
        assert pool.index.num_bytes < before
        pool.check()


async def test_full_pool_evicts_an_unleased_observation(tmp_path: Path) -> None:
    """Of the least recently used context."""
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


async def test_fully_leased_pool_has_no_room(tmp_path: Path) -> None:
    with a_pool(tmp_path, 2**20) as pool:
        pinned: list[Observation] = []
        while (observed := pool.begun(prompt_of(5, own=3 + len(pinned)))) is not None:
            pinned.append(observed)
        assert pinned
        for observed in pinned:
            pool.commit(observed.real)
            pool.observations.end(observed)
        assert pool.begun(prompt_of(5, own=99)) is not None


async def test_failed_write_is_dropped(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        observed = pool.begun(prompt_of(5))
        assert observed is not None
        pool.observations.end(observed)
        while pool.observations._settle_tasks:
            await next(iter(pool.observations._settle_tasks))
        assert (
            pool.observations.num_observations == 0
            and pool.observations.num_by_outcome["failed"] == 1
        )
        pool.check()


async def test_observation_with_a_failed_span_is_dropped(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        observed = pool.made(prompt_of(5))
        base = observed.bases[1]
        at = base.slot.status_offset
        pool.store.arena.view[at : at + 8] = ExportStatus.FAILED.to_bytes(8, "little")
        base.is_committed = False
        assert pool.find(prompt_of(5)) == []
        assert pool.observations.num_observations == 0


async def test_equal_texts_make_one_observation(tmp_path: Path) -> None:
    with a_pool(tmp_path) as pool:
        pool.begun(prompt_of(5))
        bases = pool.bases(prompt_of(6))
        assert not pool.observations.is_missing(SCOPE, template(5), {})
        assert pool.observations.is_missing(SCOPE, template(6), bases)
        assert pool.observations.is_missing(SCOPE, template(5, length=61), {})
