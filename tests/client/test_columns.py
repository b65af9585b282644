"""Columns of tokens: slicing, joining, the wire, packed results and resumed samples.

All columns, present or absent, are drawn together: a column that is added is tested here, too.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import BaseModel
from safetensors.numpy import load, save

from coppice.rollout_options import to_continue_from
from coppice.rollout_results import result_of, result_of_packed, sample_of
from coppice.wire.columns.kinds import Experts, KvSpans, Values
from coppice.wire.columns.kv_version_spans import KvVersionSpan
from coppice.wire.columns.logprobs import TokenLogprobs
from coppice.wire.columns.routed_experts import RoutedExperts
from coppice.wire.columns.support import Support
from coppice.wire.columns.token_columns import (
    COLUMNS,
    TokenColumns,
    TokenLists,
    column_bytes,
    columns_of,
)
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.packed.results import pack, parts_of, unpack
from coppice.wire.rollouts import (
    GroupAnswer,
    RolloutAnswer,
    SampleAnswer,
    SegmentAnswer,
    UnfinishedSample,
)
from engine.sampling.support_encoding import encode_mask
from tests.client.answers import USAGE

VOCAB_SIZE = 16
PROMPT_LENGTH = 3
MAX_LENGTH = 8
LABELS = st.sampled_from(["v1", "v2"])
FLOATS = st.floats(-9, 0, width=32)


def version_spans(length: int) -> st.SearchStrategy[tuple[VersionSpan, ...]]:
    def spans(labels: Sequence[str]) -> tuple[VersionSpan, ...]:
        return tuple(VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(labels))

    return st.lists(LABELS, min_size=length, max_size=length).map(spans)


def kv_spans(length: int) -> st.SearchStrategy[tuple[KvVersionSpan, ...]]:
    """A reading of the KV at the first token, and others at later ones, each of two versions."""

    def spans(firsts: set[int], labels: Sequence[str]) -> tuple[KvVersionSpan, ...]:
        found, borders = list[KvVersionSpan](), [*sorted({0} | firsts), length]
        for first, end in zip(borders, borders[1:], strict=False):
            num = PROMPT_LENGTH + end - 1
            for at, (begin, stop) in enumerate([(0, num // 2), (num // 2, num)]):
                label = labels[2 * first + at]
                found.append(KvVersionSpan(version=label, start=begin, end=stop, first_token=first))
        return tuple(found)

    labels = st.lists(LABELS, min_size=2 * length, max_size=2 * length)
    return st.builds(spans, st.sets(st.integers(0, length - 1)), labels)


def tables(length: int) -> st.SearchStrategy[TokenLogprobs]:
    def table(rows: Sequence[Sequence[float]]) -> TokenLogprobs:
        flat = [logprob for row in rows for logprob in row]
        return TokenLogprobs(
            offsets=np.cumsum([0, *map(len, rows)]),
            token_ids=np.arange(len(flat)),
            logprobs=np.array(flat),
        )

    return st.lists(st.lists(FLOATS, max_size=3), min_size=length, max_size=length).map(table)


def supports(length: int) -> st.SearchStrategy[Support]:
    def support(masks: Sequence[int]) -> Support:
        bits = [np.array([mask >> at & 1 for at in range(VOCAB_SIZE)], bool) for mask in masks]
        return Support(tuple(map(encode_mask, bits)), VOCAB_SIZE)

    masks = st.integers(1, 2**VOCAB_SIZE - 1)
    return st.lists(masks, min_size=length, max_size=length).map(support)


def experts(length: int) -> st.SearchStrategy[RoutedExperts]:
    num = 2 * (PROMPT_LENGTH + length - 1)

    def rows(values: Sequence[int]) -> RoutedExperts:
        return RoutedExperts.of(0, np.array(values, np.uint8).reshape(-1, 2, 1))

    return st.lists(st.integers(0, 255), min_size=num, max_size=num).map(rows)


@st.composite
def columns(draw: st.DrawFn, *, without: Sequence[str] = ()) -> TokenLists:
    """Columns of some tokens, of which the optional ones may be absent."""
    length = draw(st.integers(1, MAX_LENGTH))
    values: dict[str, Any] = {
        "versions": version_spans(length),
        "kv_versions": kv_spans(length),
        "top_logprobs": tables(length),
        "given_logprobs": tables(length),
        "support": supports(length),
        "routed_experts": experts(length),
        "token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=length, max_size=length),
    }
    for name, kind in COLUMNS.items():
        if name not in values:
            assert isinstance(kind, Values), f"no values of {name} are drawn"
            values[name] = st.lists(FLOATS, min_size=length, max_size=length)
    required = ("token_ids", "logprobs", "versions")
    found = {
        name: draw(values[name])
        for name in COLUMNS
        if name in required or (name not in without and draw(st.booleans()))
    }
    return TokenColumns.joined([TokenColumns(**found)])


def plain(found: TokenColumns[Any, Any], names: Sequence[str] = tuple(COLUMNS)) -> dict[str, Any]:
    """Columns as values that can be compared."""
    return {name: _plain(each) for name, each in found.columns().items() if name in names}


def _plain(values: Any) -> Any:
    if isinstance(values, Support):
        return values.rows, values.vocab_size
    if isinstance(values, RoutedExperts):
        return values.start, values.array.tolist()
    if isinstance(values, BaseModel):
        return values.model_dump_json()
    if isinstance(values, np.ndarray):
        return values.tolist()
    return [_plain(each) for each in values] if isinstance(values, tuple) else values


def cuts_of(found: TokenLists, places: set[int]) -> list[int]:
    return sorted(place for place in places if 0 < place < len(found.token_ids))


def names_of(model: type[BaseModel]) -> list[str]:
    return [name for name in COLUMNS if name in model.model_fields]


def sample(found: TokenLists, index: int = 0) -> SampleAnswer:
    fields = found.wire_fields(SampleAnswer)
    return SampleAnswer(**fields, index=index, finish_reason="aborted")


def segment(found: TokenLists, name: str = "0") -> SegmentAnswer:
    fields = found.wire_fields(SegmentAnswer)
    return SegmentAnswer(**fields, id=name, depth=0, finish_reason="stop")


PLACES = st.sets(st.integers(1, MAX_LENGTH))


@given(whole=columns(), places=PLACES)
def test_joined_pieces_are_the_whole(whole: TokenLists, places: set[int]) -> None:
    cuts = cuts_of(whole, places)
    assert plain(TokenColumns.joined(whole.pieces(cuts))) == plain(whole)
    assert plain(TokenColumns.joined(whole.arrays().pieces(cuts))) == plain(whole)


@given(whole=columns(), start=st.integers(0, 3), end=st.integers(4, 8), inner=st.integers(0, 4))
def test_part_of_a_part_is_a_part(whole: TokenLists, start: int, end: int, inner: int) -> None:
    end = min(end, len(whole.token_ids))
    start, inner = min(start, end), min(inner, max(end - start, 0))
    part = whole.part(start, end).part(0, inner)
    assert plain(part) == plain(whole.part(start, start + inner))


@given(whole=columns(), places=PLACES)
def test_only_the_values_of_all_tokens_fit_them(whole: TokenLists, places: set[int]) -> None:
    length = len(whole.token_ids)
    for name, values in whole.columns().items():
        if values is not None:
            assert COLUMNS[name].fits(values, length), name
            if not isinstance(COLUMNS[name], Experts | KvSpans):
                assert not COLUMNS[name].fits(values, length + 1), name


@given(whole=columns())
def test_json_has_the_columns_of_its_form(whole: TokenLists) -> None:
    for answer in (sample(whole), segment(whole)):
        model, names = type(answer), names_of(type(answer))
        found = columns_of(model.model_validate_json(answer.model_dump_json()))
        assert plain(found, names) == plain(whole, names)


@given(parts=st.lists(columns(), max_size=4))
def test_packed_result_has_the_columns_of_the_json_answer(parts: list[TokenLists]) -> None:
    samples = [sample(each, index) for index, each in enumerate(parts)]
    segments = [segment(each, str(index)) for index, each in enumerate(parts)]
    head: dict[str, Any] = {"outcome": "done", "num_prompt_tokens": 3, "num_cached_tokens": 0}
    groups = [
        GroupAnswer(**head, id="a", index=0, samples=samples),
        GroupAnswer(
            **head,
            id="b",
            index=1,
            samples=[],
            segments=segments,
            leaves=[each.id for each in segments],
        ),
    ]
    answer = RolloutAnswer(id="r", outcome="done", groups=groups, usage=USAGE)
    received = RolloutAnswer.model_validate_json(answer.model_dump_json())
    packed = unpack(pack(answer))
    from_json, from_file = result_of(received), result_of_packed(packed)
    for ours, theirs in zip(from_json.groups, from_file.groups, strict=True):
        trees = ours.tree, theirs.tree
        ours_parts = [*ours.samples, *(trees[0].segments if trees[0] else ())]
        their_parts = [*theirs.samples, *(trees[1].segments if trees[1] else ())]
        for one, other in zip(ours_parts, their_parts, strict=True):
            assert plain(one) == plain(other)
    for bare in parts_of(packed.answer):
        assert not (bare.token_ids or bare.logprobs or (bare.support and bare.support.data))
    for one, whole in zip(from_json.groups[0].samples, parts, strict=True):
        assert plain(one, names_of(SampleAnswer)) == plain(whole, names_of(SampleAnswer))


@given(whole=columns(), place=st.integers(1, MAX_LENGTH - 1))
def test_sample_that_is_resumed_has_the_columns_of_both_parts(
    whole: TokenLists, place: int
) -> None:
    length = len(whole.token_ids)
    place = min(place, length)
    given_part, rest = whole.part(0, place), whole.part(place, length)
    sent = to_continue_from([[sample_of(sample(given_part))]])
    assert sent is not None
    [received] = type(sent).model_validate_json(sent.model_dump_json(exclude_none=True)).samples
    resumed = TokenColumns.joined([columns_of(received), rest])
    assert plain(resumed, names_of(UnfinishedSample)) == plain(whole, names_of(UnfinishedSample))
    for table in (resumed.top_logprobs, resumed.given_logprobs):
        if table is not None:
            assert table.num_positions == length and not table.offsets[place]


@given(whole=columns(without=["routed_experts"]))
def test_context_after_sampled_tokens_has_no_values(whole: TokenLists) -> None:
    context: TokenLists = TokenColumns(token_ids=[1, 2], logprobs=[], versions=())
    length = len(whole.token_ids)
    joined = TokenColumns.joined([whole, context, whole])
    assert len(joined.token_ids) == 2 * length + 2
    for name, values in joined.columns().items():
        if isinstance(COLUMNS[name], Values) and name != "token_ids" and values is not None:
            assert np.isnan(values).tolist() == [
                length <= at < length + 2 for at in range(len(values))
            ]
    if joined.support is not None:
        assert joined.support[length : length + 2].is_whole
    assert plain(joined.part(length + 2, 2 * length + 2)) == plain(
        replace(whole, kv_versions=joined.part(length + 2, 2 * length + 2).kv_versions)
    )


@given(whole=columns(), places=PLACES)
def test_size_is_that_of_all_columns(whole: TokenLists, places: set[int]) -> None:
    answer = sample(whole)
    assert column_bytes(answer) == sum(column_bytes(answer, [name]) for name in COLUMNS)
    values = [name for name, kind in COLUMNS.items() if isinstance(kind, Values)]
    pieces = [sample(piece) for piece in whole.pieces(cuts_of(whole, places))]
    assert column_bytes(answer, values) == sum(column_bytes(piece, values) for piece in pieces)


def test_every_column_is_in_a_wire_form() -> None:
    assert {*names_of(SampleAnswer), *names_of(SegmentAnswer)} == set(COLUMNS)


@pytest.mark.parametrize("name", ["offsets", "token_ids", "logprobs"])
def test_packed_result_without_a_tensor_is_refused(name: str) -> None:
    found: TokenLists = TokenColumns(token_ids=[1], logprobs=[-1.0], versions=())
    group = GroupAnswer(
        id="a",
        index=0,
        outcome="done",
        num_prompt_tokens=3,
        num_cached_tokens=0,
        samples=[sample(found)],
    )
    data = pack(RolloutAnswer(id="r", outcome="done", groups=[group], usage=USAGE))
    tensors: dict[str, NDArray[Any]] = load(data)
    del tensors[name]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    with pytest.raises(ValueError, match="lacks"):
        unpack(save(tensors, metadata=header["__metadata__"]))
