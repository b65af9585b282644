"""Observation selection: weights by distance, and the conditions under which none qualifies."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.wire.rollouts import PromptSpan
from engine.types.kv import ExportSlot, KvFormat
from service.kv.arena import Extent
from service.kv.spans.index import SpanEntry, SpanKey
from service.kv.spans.observations import Observation, PromptContext
from service.kv.spans.predicted_prompt import load_pieces
from service.kv.spans.prediction_sources import (
    MAX_OBSERVATIONS_PER_SECTION,
    PredictionSources,
    are_shareable,
    distance,
    entropy,
    find_candidates,
    pairs_to_compare,
    select_observations,
    similarity_weights,
)
from service.kv.spans.prompt_template import joined, template_of
from tests.service.kv_reuse.observation_pool import SCOPE, prompt_of

Dtype = Literal["float32", "float16", "bfloat16"]
FARS = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)


def cache_entry(num_tokens: int = 1000) -> SpanEntry:
    slot = ExportSlot(arena=Path("/a"), offset=0, status_offset=0, num_tokens=num_tokens)
    return SpanEntry(slot=slot, extent=Extent(0, 0), key=SpanKey(SCOPE, 0, "", b""))


def observation_of(parts: list[PromptSpan]) -> Observation:
    template = template_of(parts)
    bases = {
        i: cache_entry(s.num_tokens)
        for i, s in enumerate(template.sections)
        if s.cache_key is not None
    }
    context = PromptContext(SCOPE, 0, template.context)
    return Observation(
        context=context, template=template, real=cache_entry(template.num_tokens), bases=bases
    )


def chosen(
    parts: list[PromptSpan],
    observations: list[Observation],
    far: list[float],
    max_entropy: float = 0.3,
) -> PredictionSources | None:
    """The selection of observations. `far` are the observations' distances, for every span."""
    template = template_of(parts)
    found = find_candidates(template, observations)
    assert found is not None
    by_observation = dict(zip(observations, far, strict=True))
    distances = {(i, a): by_observation[a] for i, a in pairs_to_compare(template, found)}
    return select_observations(template, found, distances, max_entropy)


@given(FARS)
def test_nearest_observation_weighs_most_and_weights_sum_to_one(far: list[float]) -> None:
    near = similarity_weights(far)
    assert sum(near) == pytest.approx(1)
    assert near[far.index(min(far))] == max(near)
    assert -1e-9 <= entropy(near) <= math.log2(len(far)) + 1e-9


def test_entropy_matches_a_direct_computation() -> None:
    assert entropy([0.25] * 4) == pytest.approx(2)
    assert entropy([1.0, 0.0]) == 0
    assert similarity_weights([0.0, math.log(3)]) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize(
    ("far", "max_entropy", "is_shareable"),
    [
        ([1.0, 1.0], 0.3, False),
        ([1.0, 1.0], 1.0, True),
        ([1.0, 9.0], 0.3, True),
        ([1.0, 9.0], 0.0, False),
        ([0.0, 1e4], 0.0, False),
        ([0.0, 1e4], 0.01, True),
        ([5.0], 0.3, False),
        ([5.0], 1.0, True),
        ([0.0], 0.3, True),
    ],
)
def test_observations_are_shareable_where_some_are_nearer(
    far: list[float], max_entropy: float, is_shareable: bool
) -> None:
    assert are_shareable(far, max_entropy) == is_shareable


def test_too_few_long_enough_observations_give_none() -> None:
    long, short = observation_of(prompt_of(5, 6)), observation_of(prompt_of(7, 8, length=59))
    template = template_of(prompt_of(1, 2))
    assert find_candidates(template, []) is None
    assert find_candidates(template, [long]) is None
    assert find_candidates(template, [long, short]) is None
    assert find_candidates(template, [long, short, observation_of(prompt_of(9, 9))]) is not None


def test_one_observation_of_the_same_texts_suffices_with_full_weight() -> None:
    observed = observation_of(prompt_of(5, 6))
    choice = chosen(prompt_of(5, 6), [observed], [0.0], max_entropy=0.0)
    assert choice is not None
    assert choice.weights == [{}] * 4 and choice.used == {observed}
    assert choice.exact_tokens == len(joined(prompt_of(5, 6))) - 1


def test_differing_texts_are_predicted_after_equal_ones() -> None:
    observations = [
        observation_of(prompt_of(5, 6)),
        observation_of(prompt_of(5, 7)),
        observation_of(prompt_of(8, 9)),
    ]
    choice = chosen(prompt_of(5, 1), observations, [1.0, 20.0, 30.0])
    assert choice is not None
    assert choice.exact_tokens == 100
    own, same, text, last = choice.weights
    assert (own, same) == ({}, {})
    assert list(text) == list(last) == observations
    assert text[observations[0]] == pytest.approx(1) and sum(text.values()) == pytest.approx(1)
    assert choice.used == {observations[0], observations[1]}, (
        "the second is the newest that begins alike"
    )
    assert choice.sources == set(observations)


def test_nearest_few_observations_are_selected() -> None:
    observations = [
        observation_of(prompt_of(5 + i)) for i in range(MAX_OBSERVATIONS_PER_SECTION + 3)
    ]
    far = [float(len(observations) - i) for i in range(len(observations))]
    choice = chosen(prompt_of(99), observations, far, max_entropy=1.0)
    assert choice is not None
    assert set(choice.weights[1]) == set(observations[-MAX_OBSERVATIONS_PER_SECTION:])
    assert sum(choice.weights[1].values()) == pytest.approx(1)
    assert observations[-1] in choice.used and observations[0] not in choice.used


def test_text_common_to_all_observations_does_not_distinguish_them() -> None:
    """As for a constant question after texts that change."""
    observations = [observation_of(prompt_of(5, 9)), observation_of(prompt_of(6, 9))]
    template = template_of(prompt_of(7, 9))
    found = find_candidates(template, observations)
    assert found is not None
    first, second = observations
    distances = {(1, first): 1.0, (1, second): 30.0, (2, first): 0.0, (2, second): 0.0}
    choice = select_observations(template, found, distances, 0.3)
    assert choice is not None
    assert choice.weights[2] == {first: 0.5, second: 0.5}


def test_pieces_cover_all_tokens_except_the_last() -> None:
    observations = [observation_of(prompt_of(5, 6)), observation_of(prompt_of(8, 9, length=63))]
    parts = prompt_of(1, 2)
    template = template_of(parts)
    found = find_candidates(template, observations)
    assert found is not None
    choice = select_observations(
        template, found, dict.fromkeys(pairs_to_compare(template, found), 1.0), 1.0
    )
    assert choice is not None
    bases = {1: cache_entry(60), 2: cache_entry(60)}
    pieces = load_pieces(template, bases, found, choice)
    assert [piece.start for piece in pieces[1:]] == [p.start + p.num_tokens for p in pieces[:-1]]
    assert pieces[-1].start + pieces[-1].num_tokens == len(joined(parts)) - 1
    for piece in pieces:
        assert piece.token_offset + piece.shift == piece.start
        for seen in piece.observations:
            assert seen.token_offset + seen.shift == piece.start
    assert [o.shift for o in pieces[-1].observations] == [0, -6]


KINDS = st.lists(st.sampled_from(["own", "a", "b", "c"]), min_size=1, max_size=5)


def written(kinds: list[str], lengths: Sequence[int], tokens: Sequence[int]) -> list[PromptSpan]:
    """Unnamed texts are kept, except the last; a name has one text in a prompt."""
    texts = {
        kind: [token] * length for kind, length, token in zip("abc", lengths, tokens, strict=True)
    }
    own = [PromptSpan(token_ids=[9] * 3), PromptSpan(token_ids=[10 + lengths[0]] * 2)]
    return [
        PromptSpan(token_ids=texts[kind], cache_key=kind)
        if kind in texts
        else own[i == len(kinds) - 1]
        for i, kind in enumerate(kinds)
    ]


@given(kinds=KINDS, data=st.data())
def test_pieces_tile_the_loaded_range_and_stay_within_their_sources(
    kinds: list[str], data: st.DataObject
) -> None:
    def drawn() -> list[PromptSpan]:
        three = st.tuples(*[st.integers(1, 6)] * 3)
        return written(kinds, data.draw(three), data.draw(three))

    observations = [observation_of(drawn()) for _ in range(data.draw(st.integers(0, 4)))]
    parts = drawn()
    template = template_of(parts)
    observations = [a for a in observations if a.template.context == template.context]
    found = find_candidates(template, observations)
    if found is None or template.num_template_sections == 0:
        return
    far = {pair: data.draw(st.floats(0, 100)) for pair in pairs_to_compare(template, found)}
    choice = select_observations(template, found, far, 1.0)
    assert choice is not None
    bases = {
        i: cache_entry(s.num_tokens)
        for i, s in enumerate(template.sections)
        if s.cache_key is not None
    }
    at = 0
    for piece in load_pieces(template, bases, found, choice):
        assert piece.start == at and piece.num_tokens > 0
        assert piece.token_offset + piece.num_tokens <= piece.source.num_tokens
        for seen in piece.observations:
            assert seen.token_offset + piece.num_tokens <= seen.real.num_tokens
            assert seen.token_offset + seen.shift == piece.start
            assert seen.base is None or piece.num_tokens <= seen.base.num_tokens
        assert len({seen.base is None for seen in piece.observations}) <= 1
        at += piece.num_tokens
    assert at in (template.num_tokens, template.sections[template.num_template_sections - 1].end)
    assert choice.exact_tokens <= at


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_distance_is_the_norm_of_the_difference_of_values(tmp_path: Path, dtype: Dtype) -> None:
    """Over as many tokens as the first has; keys are ignored."""
    import torch

    form = KvFormat(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype, rope={})
    draw = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    ours, theirs = (torch.randn((3, 2, 2, length, 8), generator=draw).to(kind) for length in (5, 7))
    raw = [whole.contiguous().view(torch.uint8).numpy().tobytes() for whole in (ours, theirs)]
    view = memoryview(bytes(64) + raw[0] + raw[1])
    slots = [
        ExportSlot(arena=tmp_path, offset=64 + at, status_offset=0, num_tokens=length)
        for at, length in ((0, 5), (len(raw[0]), 7))
    ]
    expected = (ours.double() - theirs.double()[:, :, :, :5])[:, 1].norm()
    assert distance(view, form, *slots) == pytest.approx(float(expected), rel=1e-5)
    assert distance(view, form, slots[0], slots[0]) == 0
