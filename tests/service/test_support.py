"""Supports of sampled tokens in the answers of rollouts, in all formats."""

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from coppice import AsyncRollouts, Branching, Sample, Segment, Support
from coppice.wire.columns.support import (
    GivenSupport,
    SupportAnswer,
    rows_of,
    split_rows,
    support_answer,
)
from coppice.wire.columns.token_columns import TokenColumns, TokenLists
from coppice.wire.packed.results import pack, unpack
from coppice.wire.rollouts import RolloutAnswer, RolloutRequest, SegmentAnswer, UnfinishedSample
from coppice.wire.sampling import Sampling
from engine.sampling.support_encoding import encode_mask
from service.errors import InvalidRequest
from service.rollouts.groups.sample_answer import answer_fields
from service.rollouts.groups.supports import check, given_support, max_row_bytes, support_of
from service.rollouts.request import NewRollout
from service.rollouts.trees import segment as trees
from service.rollouts.trees.token_tree import TokenTree
from service.rollouts.trees.tree_answer import kept_answer
from tests.fake_engine import EOS, VOCAB_SIZE, FakeEngine
from tests.service.test_resume import resume_request, started
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import serving

TREE = Branching(mode="interval", interval=32, max_leaves=4, max_depth=2, flatten=True)


def assert_supported(part: Sample | Segment) -> None:
    """The fake engine samples token t from {t}, and every fourth from the whole vocabulary."""
    assert part.support is not None and len(part.support) == len(part.token_ids)
    assert part.support.vocab_size == VOCAB_SIZE
    for token, ids in zip(part.token_ids.tolist(), part.support, strict=True):
        assert ids.tolist() == ([token] if token % 4 else list(range(VOCAB_SIZE)))


@pytest.fixture
async def client(tmp_path: Path) -> Any:
    async with serving(FakeEngine(), tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        yield rollouts


async def test_samples_have_their_supports(client: AsyncRollouts) -> None:
    result = await client.rollout([[1, 2], [3]], n=2, max_tokens=40, return_support=True)
    for each in result.groups:
        for sample in each.samples:
            assert_supported(sample)


async def test_supports_are_absent_unless_requested(client: AsyncRollouts) -> None:
    result = await client.rollout([[1, 2]], max_tokens=4)
    assert result.groups[0].samples[0].support is None
    [record] = [r async for r in client.stream([[1, 2]], max_tokens=4) if r.type == "sample"]
    assert "support" not in record.sample.model_dump()


async def test_segments_and_paths_of_a_tree_have_their_supports(client: AsyncRollouts) -> None:
    result = await client.rollout([[1, 2]], max_tokens=90, branching=TREE, return_support=True)
    [answer] = result.groups
    assert answer.tree is not None and len(answer.tree.segments) > 3
    for segment in answer.tree.segments:
        assert_supported(segment)
    for sample in (*answer.samples, *answer.tree.rows()):
        assert_supported(sample)


async def test_packed_answer_with_wrong_lengths_is_refused(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        sent = {**body(group(1)), "return_support": True}
        response = await served.http.post("/v1/rollouts", json=sent)
    data = pack(RolloutAnswer.model_validate_json(response.content))
    tensors, metadata = load(data), {"answer": _metadata(data)}
    lengths, sets = tensors["support_lengths"], tensors["support_data"]
    for changed in (
        {"support_lengths": lengths + np.uint32(1)},
        {"support_lengths": lengths[1:]},
        {"support_data": np.append(sets, np.uint8(0))},
    ):
        with pytest.raises(ValueError, match="support"):
            unpack(save({**tensors, **changed}, metadata=metadata))


def _metadata(packed: bytes) -> str:
    header = json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")])
    answer: str = header["__metadata__"]["answer"]
    return answer


async def test_cut_sample_is_continued_with_its_supports(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        options: dict[str, Any] = {"n": 2, "max_tokens": 10, "return_support": True}
        cut = asyncio.create_task(rollouts.rollout([[1, 2]], **options))
        await running_samples(served, 2)
        engine.step(4)
        await served.server.rollouts.cancel(next(iter(served.server.rollouts._running.values())))
        [before] = (await cut).groups
        for sample in before.unfinished:
            assert len(sample.token_ids) == 4
            assert_supported(sample)
        engine.instant = True
        result = await rollouts.rollout([[1, 2]], continue_from=[before.unfinished], **options)
    for sample in result.groups[0].samples:
        assert len(sample.token_ids) == 10
        assert_supported(sample)


async def test_supports_of_a_continued_sample_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = list[SupportAnswer | GivenSupport]()

    def counted(given: SupportAnswer | GivenSupport) -> list[bytes]:
        decoded.append(given)
        return rows_of(given)

    monkeypatch.setattr("service.rollouts.groups.supports.rows_of", counted)
    given = started(90, 91, support=GIVEN)
    async with serving(FakeEngine(), tmp_path) as served:
        sent = resume_request(given, return_support=True)
        response = await served.http.post("/v1/rollouts", json=sent)
    assert response.status_code == 200
    assert len(decoded) == 1


GIVEN = {"vocab_size": VOCAB_SIZE, "lengths": [1, 2], "data": "AAFQ"}


@pytest.mark.parametrize(
    ("support", "wanted"),
    [
        (None, True),
        (GIVEN, False),
        ({**GIVEN, "vocab_size": 100}, True),
        ({**GIVEN, "lengths": [3]}, True),
        ({**GIVEN, "lengths": [1, 1]}, True),
        ({**GIVEN, "data": "$$$$"}, True),
    ],
)
async def test_wrong_supports_of_a_continued_sample_are_refused(
    support: dict[str, Any] | None, wanted: bool, tmp_path: Path
) -> None:
    given = started(90, 91, **({} if support is None else {"support": support}))
    async with serving(FakeEngine(), tmp_path) as served:
        sent = resume_request(given, return_support=wanted)
        response = await served.http.post("/v1/rollouts", json=sent)
    assert response.status_code == 422
    assert "support" in response.json()["detail"]


async def test_supports_of_another_number_of_tokens_are_not_decoded(tmp_path: Path) -> None:
    given = started(90, 91, support={**GIVEN, "lengths": [3], "data": "$$$$"})
    async with serving(FakeEngine(), tmp_path) as served:
        sent = resume_request(given, return_support=True)
        response = await served.http.post("/v1/rollouts", json=sent)
    assert response.status_code == 422
    assert "one support per token" in response.json()["detail"]


async def test_large_given_supports_are_decoded_beside_the_event_loop() -> None:
    answer = support_answer([b"\x01\x05", *[bytes([3]) + bytes(32)] * 20_000], VOCAB_SIZE)
    sample = UnfinishedSample.model_validate(started(*[90] * 20_001, support=answer.model_dump()))
    other = asyncio.create_task(asyncio.sleep(0))
    decoded = await given_support(sample, wanted=True, vocab_size=VOCAB_SIZE)
    assert other.done()
    assert decoded is not None and len(decoded.rows) == 20_001


@pytest.mark.parametrize("reference", [b"\x04", b"\x04\x01", b"\x04\x80", b"\x04\x00\x00"])
def test_reference_that_is_not_one_earlier_token_is_refused(reference: bytes) -> None:
    with pytest.raises(ValueError, match="does not precede it"):
        split_rows(b"\x00" + reference, [1, len(reference)], 8)


def test_references_to_distant_tokens_are_resolved() -> None:
    rows = [b"\x01\x05\x06\x07\x08", *[bytes([1, 1, at % 100]) for at in range(20_000)]]
    rows.append(rows[0])
    assert rows_of(support_answer(rows, 256)) == rows


async def test_request_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    limits = {"max_support_bytes": 3000}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        wide = {**body(group(1, n=4)), "sampling": {"max_tokens": 30, "top_p": 0.9}}
        assert (await served.http.post("/v1/rollouts", json=wide)).status_code == 200
        refused = await served.http.post("/v1/rollouts", json={**wide, "return_support": True})
        wide["sampling"]["top_k"] = 5
        narrow = await served.http.post("/v1/rollouts", json={**wide, "return_support": True})
    assert refused.status_code == 422
    assert "120 tokens with sets of up to 33 bytes" in refused.json()["detail"]
    assert narrow.status_code == 200


async def test_supports_of_concurrent_requests_are_limited_together(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, limits={"max_support_bytes": 3000}) as served:
        sampling = {"max_tokens": 30, "top_p": 0.9}
        wide = {**body(group(1, n=2)), "sampling": sampling, "return_support": True}
        first = asyncio.create_task(served.http.post("/v1/rollouts", json=wide))
        await running_samples(served, 2)
        refused = await served.http.post("/v1/rollouts", json=wide)
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        engine.step(30)
        assert (await first).status_code == 200
        engine.instant = True
        assert (await served.http.post("/v1/rollouts", json=wide)).status_code == 200


@pytest.mark.parametrize(
    ("branching", "max_kept_bytes", "num_tokens"),
    [(None, 3000, None), (None, 1600, 60), (TREE, 10_000, None), (TREE, 6000, 180)],
)
def test_supports_of_a_kept_result_fit_into_the_result_cache(
    branching: Branching | None, max_kept_bytes: int, num_tokens: int | None
) -> None:
    tree = (
        {}
        if branching is None
        else {"branching": {**branching.model_dump(exclude_none=True), "max_leaves": 2}}
    )
    sampling = {"max_tokens": 30, "top_p": 0.9}
    asked = {**body(group(1, n=1 if tree else 2)), **tree, "sampling": sampling}
    given = RolloutRequest.model_validate({**asked, "return_support": True})
    request = NewRollout.of(given, owner="local", can_move=False)
    info = FakeEngine().info
    check(request, [[1]], info, max_bytes=10_000, max_kept_bytes=None)
    expected = nullcontext() if num_tokens is None else pytest.raises(InvalidRequest)
    with expected as refused:
        check(request, [[1]], info, max_bytes=10_000, max_kept_bytes=max_kept_bytes)
    if refused is not None:
        assert f"for {num_tokens} tokens" in str(refused.value)
        assert "limits.keep_answers_bytes" in str(refused.value)


@pytest.mark.parametrize("headers", [{"prefer": "respond-async"}, {"idempotency-key": "a"}])
async def test_request_whose_result_could_not_be_kept_is_refused(
    headers: dict[str, str], tmp_path: Path
) -> None:
    limits = {"keep_answers_bytes": 40_000}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        sampling = {"max_tokens": 30, "top_p": 0.9}
        wide = {**body(group(1, n=32)), "sampling": sampling, "return_support": True}
        refused = await served.http.post("/v1/rollouts", json=wide, headers=headers)
        assert refused.status_code == 422
        assert "limits.keep_answers_bytes" in refused.json()["detail"]
        assert (await served.http.post("/v1/rollouts", json=wide)).status_code == 200


@pytest.mark.parametrize(
    ("sampling", "num_bytes"),
    [
        ({}, 1),
        ({"top_k": 4}, 1 + 4 * 2),
        ({"top_k": 4, "temperature": 0.0}, 1),
        ({"top_p": 0.9}, 1 + 32),
        ({"min_p": 0.1}, 1 + 32),
        ({"structured_outputs": {"regex": "a"}}, 1 + 32),
        ({"allowed_token_ids": [1, 2]}, 1 + 2 * 2),
        ({"allowed_token_ids": [1, 2], "top_p": 0.9}, 1 + 2 * 2),
        ({"bad_words": ["a", "b", "c"]}, 1 + 6 * 2),
        ({"min_tokens": 4, "stop_token_ids": [5]}, 1 + 2 * 2),
    ],
)
def test_bound_of_a_set_follows_from_the_controls(sampling: dict[str, Any], num_bytes: int) -> None:
    info = FakeEngine().info
    assert info.eos_token_ids == (EOS,)
    assert max_row_bytes(Sampling.model_validate(sampling), info) == num_bytes


@pytest.mark.parametrize(
    ("vocab_size", "per_id"), [(100, 1), (2**14 - 1, 2), (152_000, 3), (2**21, 4), (2**24, 4)]
)
def test_bound_of_a_set_covers_the_longest_token_ids(vocab_size: int, per_id: int) -> None:
    info = replace(FakeEngine().info, vocab_size=vocab_size)
    assert max_row_bytes(Sampling(top_k=2), info) == 1 + 2 * per_id
    mask = np.zeros(vocab_size, np.bool_)
    mask[-1] = True
    assert len(encode_mask(mask)) <= 1 + per_id


def test_support_is_a_sequence_of_sets() -> None:
    support = Support((b"\x00", b"\x01\x05", b"\x01\x05", b"\x02\x00"), 8)
    assert [ids.tolist() for ids in support] == [[*range(8)], [5], [5], [*range(1, 8)]]
    assert support[1:3].rows == (b"\x01\x05", b"\x01\x05")
    assert support.mask().sum(1).tolist() == [8, 1, 1, 7]
    assert support.num_bytes == 5
    assert not support.is_whole and support[:1].is_whole


class CountedRows(tuple[bytes, ...]):
    """Rows that record the threads in which they are read."""

    threads: list[int]

    def __iter__(self) -> Iterator[bytes]:
        self.threads.append(threading.get_ident())
        return super().__iter__()


def counted(rows: Iterable[bytes]) -> CountedRows:
    found = CountedRows(rows)
    found.threads = []
    return found


def supported(rows: CountedRows, vocab_size: int) -> TokenLists:
    num_tokens = len(rows)
    return TokenColumns(
        token_ids=[1] * num_tokens,
        logprobs=[-1.0] * num_tokens,
        versions=(),
        support=Support(rows, vocab_size),
    )


async def test_supports_of_a_segment_are_encoded_once_beside_the_event_loop() -> None:
    rows = counted(bytes([3]) + at.to_bytes(200) for at in range(8192))
    root = trees.Segment(id="", token_ids=np.arange(3, dtype=np.int32))
    segment = TokenTree("0").add(root, supported(rows, 1600), "stop")
    one, same = await kept_answer(segment), await kept_answer(segment)
    assert one.support is not None and one.support is same.support
    assert one.support.lengths == [201] * 8192
    assert len([each for each in rows.threads if each != threading.get_ident()]) == 1


async def test_many_short_supports_are_encoded_beside_the_event_loop() -> None:
    few, many = (counted([b"\x01\x05"] * num) for num in (100, 8192))
    await answer_fields(supported(few, VOCAB_SIZE), SegmentAnswer)
    await answer_fields(supported(many, VOCAB_SIZE), SegmentAnswer)
    assert {*few.threads} == {threading.get_ident()}
    assert many.threads[-1] != threading.get_ident()


def test_equal_supports_share_their_memory() -> None:
    rows = [bytes([1, 5]) for _ in range(2)]
    found = support_of(rows, VOCAB_SIZE)
    assert found is not None and list(found.rows) == rows
    assert found.rows[0] is found.rows[1]


def test_supports_of_a_tree_are_bounded_by_its_tokens() -> None:
    """Its segments have at most `max_new_tokens_total` tokens, however many leaves there may be."""
    tree = {"mode": "interval", "interval": 8, "max_leaves": 4, "max_depth": 2}
    info = FakeEngine().info

    def num_bytes(**limits: int) -> int:
        sampling = {"max_tokens": 30, "top_p": 0.9}
        asked = {**body(group(1)), "branching": {**tree, **limits}, "sampling": sampling}
        given = RolloutRequest.model_validate({**asked, "return_support": True})
        request = NewRollout.of(given, owner="local", can_move=False)
        return check(request, [[1]], info, max_bytes=10**6, max_kept_bytes=None)

    per_token = max_row_bytes(Sampling(top_p=0.9), info)
    assert num_bytes(max_new_tokens_total=50) == 50 * per_token
    assert num_bytes(max_new_tokens_total=1000) == 4 * 30 * per_token
