"""kv_reuse.mode predict over the fake engine: sources of the loaded KV, and the answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.types.kv import ExportStatus
from engine.types.samples import SampleRequest
from service.kv.spans.observations import MAX_OBSERVATIONS_PER_CONTEXT
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.kv_reuse.span_requests import (
    ASK,
    OWN,
    post_rollout,
    predicted,
    request_with_spans,
    reusing,
    span,
)
from tests.service.test_rollouts import running_samples
from tests.serving import Served

NUM_TOKENS = 40 + 70 + 4 + 60 + 4


def engine_of(**rest: Any) -> FakeEngine:
    return FakeEngine(prompt_kv=True, **rest)


async def two_observations(served: Served, **rest: Any) -> None:
    for tool, tale in ((5, 6), (50, 60)):
        group = await post_rollout(served, predicted(tool, tale, **rest))
        assert (group["exact"], group["kv_reuse"]["reason"]) == (True, "no_observations")


def last(engine: FakeEngine) -> SampleRequest:
    return engine.submitted[-1]


async def test_prompt_without_observations_is_prefilled_and_becomes_an_observation(
    tmp_path: Path,
) -> None:
    """Its spans are prefilled alone beside it, and do not delay it."""
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        group = await post_rollout(served, predicted())
        assert served.server.kv_reuse.observations.num_observations == 1
    first, tool, tale, second = engine.submitted
    assert (list(tool.prompt_token_ids), list(tale.prompt_token_ids)) == ([5] * 70, [6] * 60)
    assert first.export is not None and first.export.num_tokens == NUM_TOKENS - 1
    assert second.export is None and first.load is None and second.load is None
    assert {request.cache_salt for request in engine.submitted} == {None}
    assert group["exact"] is True
    assert group["kv_reuse"] == {
        "mode": "predict",
        "num_reused_tokens": 0,
        "num_computed_tokens": NUM_TOKENS,
        "num_prepared_tokens": 130,
        "num_round_trips": 1,
        "num_observations": 0,
        "reason": "no_observations",
    }


async def test_prompt_is_predicted_from_two_observations_and_one_token_is_prefilled(
    tmp_path: Path,
) -> None:
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        group = await post_rollout(served, predicted(7, 8))
        metrics = (await served.http.get("/metrics")).text
    *_, tool, tale, first, second = engine.submitted
    load = first.load
    assert load is not None and second.load is load
    assert (load.num_requests, load.exact_tokens) == (2, len(OWN))
    spans = [(piece.start, piece.num_tokens, piece.shift) for piece in load.pieces]
    assert spans == [(0, 40, 0), (40, 70, 40), (110, 4, 0), (114, 60, 114), (174, 3, 0)]
    bases = [load.pieces[1].source, load.pieces[3].source]
    assert bases == [tool.export, tale.export]
    seen = [
        [(o.token_offset, o.shift, o.base is None) for o in piece.observations]
        for piece in load.pieces
    ]
    assert seen == [
        [],
        [(40, 0, False)] * 2,
        [(110, 0, True)] * 2,
        [(114, 0, False)] * 2,
        [(174, 0, True)] * 2,
    ]
    assert load.pieces[2].observations[0].weight == pytest.approx(1.0)
    assert group["exact"] is False
    assert group["kv_reuse"]["num_reused_tokens"] == NUM_TOKENS - 1
    assert group["kv_reuse"]["num_computed_tokens"] == 1
    assert group["kv_reuse"]["num_prepared_tokens"] == 130
    assert (group["kv_reuse"]["num_observations"], group["kv_reuse"]["num_round_trips"]) == (2, 2)
    assert 'coppice_kv_reuse_groups_total{mode="predict",outcome="done"} 1.0' in metrics
    assert 'coppice_kv_reuse_groups_total{mode="predict",outcome="no_observations"} 2.0' in metrics
    assert 'coppice_kv_reuse_observation_outcomes_total{outcome="created"} 2.0' in metrics
    assert "coppice_kv_reuse_observations 2.0" in metrics


async def test_observations_of_other_lengths_serve_texts_that_are_not_longer(
    tmp_path: Path,
) -> None:
    """KV after a shorter text is shifted back by the difference."""
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        body = predicted(7, 8)
        body["groups"][0]["prompt"]["spans"][1]["token_ids"] = [7] * 64
        shorter = await post_rollout(served, body)
        load = last(engine).load
        body["groups"][0]["prompt"]["spans"][1]["token_ids"] = [9] * 71
        longer = await post_rollout(served, body)
    assert (shorter["exact"], shorter["kv_reuse"]["reason"]) == (False, None)
    assert load is not None
    assert [o.shift for piece in load.pieces[2:] for o in piece.observations] == [-6] * 6
    assert (longer["exact"], longer["kv_reuse"]["reason"]) == (True, "no_observations")


async def test_repeated_prompt_is_loaded_from_its_observation_and_exact(tmp_path: Path) -> None:
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await post_rollout(served, predicted())
        group = await post_rollout(served, predicted())
        assert served.server.kv_reuse.observations.num_observations == 1
    load = last(engine).load
    assert load is not None and load.exact_tokens == NUM_TOKENS - 1
    assert len({piece.source for piece in load.pieces}) == 1
    assert not any(piece.observations for piece in load.pieces)
    assert (group["exact"], group["kv_reuse"]["reason"]) == (True, None)
    assert (group["kv_reuse"]["num_reused_tokens"], group["kv_reuse"]["num_observations"]) == (
        NUM_TOKENS - 1,
        1,
    )


async def test_shared_leading_texts_are_exact_up_to_the_first_difference(
    tmp_path: Path,
) -> None:
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        await post_rollout(served, predicted(5, 8))
    load = last(engine).load
    assert load is not None and load.exact_tokens == 114
    assert [bool(piece.observations) for piece in load.pieces] == [False] * 3 + [True] * 2


async def test_last_text_unknown_to_the_observations_is_prefilled(tmp_path: Path) -> None:
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        body = predicted(7, 8)
        body["groups"][0]["prompt"]["spans"][4]["token_ids"] = [9] * 6
        group = await post_rollout(served, body)
    load = last(engine).load
    assert load is not None and load.pieces[-1].start + load.pieces[-1].num_tokens == 174
    assert (group["exact"], group["kv_reuse"]["num_computed_tokens"]) == (False, 6)


async def test_equally_distant_observations_are_not_shareable(tmp_path: Path) -> None:
    """A text midway between two observations is prefilled and becomes an observation.

    At max_entropy 1 they are shareable.
    """
    async with reusing(engine_of(), tmp_path) as served:
        await two_observations(served)
        middle = predicted(7, (6 + 60) // 2)
        told = [await post_rollout(served, middle) for _ in range(2)]
        assert served.server.kv_reuse.observations.num_observations == 3
        anything = {"mode": "predict", "max_entropy": 1.0}
        between = predicted((50 + 7) // 2 + 1, (6 + 60) // 2, kv_reuse=anything)
        told.append(await post_rollout(served, between))
    assert [(group["exact"], group["kv_reuse"]["reason"]) for group in told] == [
        (True, "entropy_too_high"),
        (True, None),
        (False, None),
    ]


async def test_other_contexts_keys_and_weights_find_no_observation(tmp_path: Path) -> None:
    secrets = write_keys(tmp_path / "keys", one="rollout", other="rollout", admin="admin")
    server = {"keys_file": tmp_path / "keys"}
    one, other, admin = (bearer(secrets[name]) for name in ("one", "other", "admin"))
    async with reusing(engine_of(), tmp_path, server=server) as served:
        for tool in (5, 50, 7):
            mine = await post_rollout(served, predicted(tool, tool + 1), **one)
        theirs = await post_rollout(served, predicted(7, 8), **other)
        elsewhere = await post_rollout(served, predicted(7, 8, own=[3] * 40), **one)
        await served.http.put("/v1/weights/v1", content=b"x", headers=admin)
        await served.http.post("/v1/weights/v1/activate", json={}, headers=admin)
        assert served.server.kv_reuse.observations.num_observations == 0
        later = await post_rollout(served, predicted(7, 8), **one)
    assert mine["exact"] is False
    told = [group["kv_reuse"]["reason"] for group in (theirs, elsewhere, later)]
    assert told == ["no_observations"] * 3
    assert later["kv_reuse"]["num_prepared_tokens"] == 130


async def test_weights_that_change_before_the_samples_leave_an_exact_prompt(
    tmp_path: Path,
) -> None:
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        engine.instant = False
        asking = asyncio.create_task(post_rollout(served, predicted(5, 8)))
        await running_samples(served, 1)
        engine.step()
        await running_samples(served, 2)
        await served.http.put("/v1/weights/v1", content=b"x")
        await served.http.post("/v1/weights/v1/activate", json={})
        while not asking.done():
            engine.step()
            await asyncio.sleep(0.001)
        group = await asking
    assert (group["exact"], group["kv_reuse"]["reason"]) == (True, "not_loaded")
    assert (group["kv_reuse"]["num_reused_tokens"], group["kv_reuse"]["num_observations"]) == (0, 0)


async def test_spans_evicted_by_the_engine_are_written_again(tmp_path: Path) -> None:
    """As after a reset of the prefix cache under the same weights."""
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        engine.written.clear()
        told = [
            (await post_rollout(served, predicted(tool, 8)))["kv_reuse"]["reason"]
            for tool in (7, 8, 9, 10)
        ]
    assert told == ["not_loaded", "no_observations", "no_observations", None]


async def test_observation_that_was_not_written_does_not_exist(tmp_path: Path) -> None:
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        engine.export_status = ExportStatus.FAILED
        await post_rollout(served, predicted())
        await asyncio.sleep(0.01)
        assert served.server.kv_reuse.observations.num_observations == 0
        engine.export_status = ExportStatus.COMMITTED
        await two_observations(served)
        assert (await post_rollout(served, predicted(7, 8)))["exact"] is False


async def test_groups_with_equal_texts_make_one_observation(tmp_path: Path) -> None:
    engine = engine_of(instant=False)
    async with reusing(engine, tmp_path) as served:
        groups = [asyncio.create_task(post_rollout(served, predicted())) for _ in range(3)]
        await running_samples(served, 2 + 3 * 2)
        while not all(group.done() for group in groups):
            engine.step()
            await asyncio.sleep(0.001)
        assert [(await group)["kv_reuse"]["reason"] for group in groups] == ["no_observations"] * 3
        assert served.server.kv_reuse.observations.num_observations == 1
    writers = [request for request in engine.submitted if request.export is not None]
    assert len(writers) == 3, "two spans and a prompt"


@pytest.mark.parametrize("num_steps", [0, 1, 2])
async def test_cancelled_group_leaves_nothing(tmp_path: Path, num_steps: int) -> None:
    """During the prefill of its prompt and spans, or of a prompt from which it is predicted."""
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        engine.instant = False
        body = predicted(7, 8) if num_steps < 2 else predicted(7, 8, own=[4] * 9)
        asking = asyncio.create_task(post_rollout(served, body))
        await running_samples(served, 2 if num_steps < 2 else 4)
        if num_steps == 1:
            engine.step()
            while engine.submitted[-1].load is None:
                await asyncio.sleep(0.001)
        [rollout] = served.server.rollouts.in_flight()
        await served.server.rollouts.cancel(rollout)
        group = await asking
        assert not engine.running
        await asyncio.sleep(0.01)
        assert served.server.kv_reuse.observations.num_observations == 2
    assert group["outcome"] == "cancelled"
    assert all(sample["finish_reason"] == "aborted" for sample in group["samples"])


async def test_dropped_observations_stay_until_they_were_loaded(tmp_path: Path) -> None:
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        engine.instant = False
        asking = asyncio.create_task(post_rollout(served, predicted(7, 8)))
        await running_samples(served, 2)
        observations = served.server.kv_reuse.observations
        observations.forget(
            [observed for there in observations._contexts.values() for observed in there]
        )
        while not asking.done():
            engine.step()
            await asyncio.sleep(0.001)
        group = await asking
        served.server.kv_reuse.spans.check()
    assert [sample["finish_reason"] for sample in group["samples"]] == ["length"] * 2
    assert last(engine).load is not None


async def test_deadline_ends_the_group(tmp_path: Path) -> None:
    engine = engine_of()
    async with reusing(engine, tmp_path) as served:
        await two_observations(served)
        engine.instant = False
        group = await post_rollout(served, predicted(7, 8, finish={"deadline_seconds": 0.05}))
        assert not engine.running
        await asyncio.sleep(0.01)
    assert [sample["finish_reason"] for sample in group["samples"]] == ["deadline"] * 2


async def test_observations_per_context_are_bounded(tmp_path: Path) -> None:
    """Threshold 0: every prompt is prefilled."""
    exactly = {"mode": "predict", "max_entropy": 0.0}
    async with reusing(engine_of(), tmp_path, spans_bytes=2**25) as served:
        for tool in range(4, MAX_OBSERVATIONS_PER_CONTEXT + 8):
            group = await post_rollout(served, predicted(tool, 200, kv_reuse=exactly))
            assert group["exact"] is True
        observations = served.server.kv_reuse.observations
        assert observations.num_observations <= MAX_OBSERVATIONS_PER_CONTEXT
        assert (
            observations.num_by_outcome["created"] - observations.num_by_outcome["evicted"]
            == observations.num_observations
        )


async def test_full_pool_evicts_unused_observations(tmp_path: Path) -> None:
    """Two MiB have room for the observations and spans of a few contexts."""
    async with reusing(engine_of(), tmp_path, spans_bytes=2**21) as served:
        for i in range(12):
            group = await post_rollout(served, predicted(7, 8, own=[i + 1] * 40))
            assert group["kv_reuse"]["reason"] in ("no_observations", "cache_full")
        observations = served.server.kv_reuse.observations
        assert observations.num_by_outcome["evicted"] > 0
        assert observations.num_observations > 0


async def test_prompt_too_long_for_an_observation_is_prefilled(tmp_path: Path) -> None:
    async with reusing(FakeEngine(prompt_kv=True, max_context_tokens=4096), tmp_path) as served:
        group = await post_rollout(served, predicted(own=[1] * 3000))
        assert (group["exact"], group["kv_reuse"]["reason"]) == (True, "cache_full")
        assert served.server.kv_reuse.observations.num_observations == 0


async def test_prompt_without_named_spans_or_with_one_alone_splices_nothing(tmp_path: Path) -> None:
    observations = {"mode": "predict"}
    async with reusing(engine_of(), tmp_path) as served:
        for spans in ([span([1, 2])], [span([1, 2], "x")]):
            group = await post_rollout(served, request_with_spans(*spans, kv_reuse=observations))
            assert (group["exact"], group["kv_reuse"]["reason"]) == (True, "nothing_to_reuse")


async def test_prompt_may_begin_and_end_with_a_span(tmp_path: Path) -> None:
    """The first is spliced exactly, as prefilled alone; the last except for its last token."""
    engine = engine_of()

    def body(tool: int, tale: int) -> dict[str, Any]:
        return request_with_spans(
            span([tool] * 70, "tool"),
            span(ASK),
            span([tale] * 60, "tale"),
            kv_reuse={"mode": "predict"},
        )

    async with reusing(engine, tmp_path) as served:
        for tool, tale in ((5, 6), (50, 60)):
            await post_rollout(served, body(tool, tale))
        group = await post_rollout(served, body(7, 8))
    load = last(engine).load
    assert load is not None and load.exact_tokens == 70
    spans = [(p.start, p.num_tokens, p.shift, len(p.observations)) for p in load.pieces]
    assert spans == [(0, 70, 0, 0), (70, 4, 0, 2), (74, 59, 74, 2)]
    assert (group["exact"], group["kv_reuse"]["num_computed_tokens"]) == (False, 1)
