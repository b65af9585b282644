"""Prefilled token ranges against a direct computation, over random spans."""

from hypothesis import given
from hypothesis import strategies as st

from coppice.wire.rollouts import PromptSpan
from engine.types.kv import ExportSlot
from service.kv.spans.spliced_prompt import TokenRun, build_load, prefill_lengths, token_runs

PARTS = st.lists(
    st.builds(
        lambda num, named: PromptSpan(token_ids=[1] * num, cache_key="x" if named else None),
        st.integers(1, 12),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def slot(num_tokens: int) -> ExportSlot:
    from pathlib import Path

    return ExportSlot(arena=Path("/a"), offset=0, status_offset=0, num_tokens=num_tokens)


def test_unnamed_text_and_first_tokens_are_prefilled() -> None:
    parts = [
        PromptSpan(token_ids=[1] * 5),
        PromptSpan(token_ids=[2] * 8, cache_key="a"),
        PromptSpan(token_ids=[3] * 8, cache_key="b"),
        PromptSpan(token_ids=[4]),
    ]
    assert token_runs(parts, recompute_tokens=2, block=1) == [
        TokenRun(start=0, end=7),
        TokenRun(start=7, end=13, span=1, origin=5),
        TokenRun(start=13, end=15),
        TokenRun(start=15, end=21, span=2, origin=13),
        TokenRun(start=21, end=22),
    ]
    joined = token_runs(parts, recompute_tokens=0, block=1)
    assert [run.span for run in joined] == [None, 1, 2, None]


def test_leading_span_is_a_prefix_and_prefilled() -> None:
    parts = [PromptSpan(token_ids=[2] * 8, cache_key="a"), PromptSpan(token_ids=[1])]
    assert token_runs(parts, recompute_tokens=0, block=1) == [TokenRun(start=0, end=9)]


def test_spliced_kv_begins_at_a_block_boundary() -> None:
    parts = [
        PromptSpan(token_ids=[1] * 5),
        PromptSpan(token_ids=[2] * 20, cache_key="a"),
        PromptSpan(token_ids=[4]),
    ]
    assert token_runs(parts, recompute_tokens=2, block=4) == [
        TokenRun(start=0, end=8),
        TokenRun(start=8, end=25, span=1, origin=5),
        TokenRun(start=25, end=26),
    ]


@given(parts=PARTS, recompute_tokens=st.integers(0, 6), block=st.integers(1, 6))
def test_spans_tile_the_prompt_and_a_link_ends_before_every_splice(
    parts: list[PromptSpan], recompute_tokens: int, block: int
) -> None:
    length = sum(len(span.token_ids) for span in parts)
    spans = token_runs(parts, recompute_tokens=recompute_tokens, block=block)
    assert spans[0].start == 0 and spans[-1].end == length
    assert spans[0].span is None and spans[-1].span is None
    assert all(a.end == b.start for a, b in zip(spans, spans[1:], strict=False))
    for run in spans:
        assert run.num_tokens >= (1 if run.span is None else block)
        if run.span is not None:
            assert run.start % block == 0
            assert recompute_tokens <= run.start - run.origin < recompute_tokens + block
    kept = {i: slot(len(span.token_ids)) for i, span in enumerate(parts)}
    load, ends = build_load(spans, kept, chain="chain", num_requests=1), prefill_lengths(spans)
    runs = [piece.start for piece in load.pieces]
    joined = {piece.start + piece.num_tokens for piece in load.pieces}
    assert ends == [start for start in runs if start not in joined]
    for piece in load.pieces:
        assert piece.token_offset + piece.num_tokens <= piece.source.num_tokens
        assert piece.start == piece.shift + piece.token_offset
