"""Division of pieces into runs and of runs among ranks, against hand-written cases."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kv_transfer.worker.loader import MAX_PREDICTED_TOKENS, SpanAssembler, group_runs
from engine.kv_transfer.worker.mapped_arena import Arenas
from engine.types.kv import ExportSlot, LoadPiece, ObservedKv
from kernels.rope_shift import parse_rotary
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import kv_format
from tests.engine.kv_transfer.test_loader_step import FORM

SOURCE = ExportSlot(arena=Path("/arena"), offset=0, status_offset=0, num_tokens=10_000)
OBSERVED = ObservedKv(
    real=SOURCE, token_offset=5, shift=0, base=SOURCE, base_token_offset=0, weight=1.0
)


def piece(start: int, num_tokens: int, *, predicted: bool = False) -> LoadPiece:
    observations = (OBSERVED,) if predicted else ()
    return LoadPiece(
        source=SOURCE,
        token_offset=0,
        num_tokens=num_tokens,
        start=start,
        shift=0,
        observations=observations,
    )


def spans(*pieces: LoadPiece) -> list[list[tuple[int, int]]]:
    return [[(part.start, part.end) for part in run] for run in group_runs(pieces, 32)]


def test_block_aligned_pieces_are_written_alone() -> None:
    assert spans(piece(32, 20), piece(64, 32)) == [[(32, 52)], [(64, 96)]]


def test_pieces_that_share_a_block_are_written_together() -> None:
    pieces = (piece(0, 40), piece(40, 4), piece(44, 20), piece(64, 7))
    assert spans(*pieces) == [[(0, 32)], [(32, 40), (40, 44), (44, 64)], [(64, 71)]]


def test_only_the_shared_blocks_of_long_pieces_are_assembled() -> None:
    """Assembled KV is held in addition to the cache."""
    assert spans(piece(0, 4000), piece(4000, 7, predicted=True), piece(4007, 3000)) == [
        [(0, 4000)],
        [(4000, 4007), (4007, 4032)],
        [(4032, 7007)],
    ]
    assert spans(piece(0, 4010), piece(4010, 7, predicted=True)) == [
        [(0, 4000)],
        [(4000, 4010), (4010, 4017)],
    ]


@pytest.mark.parametrize("block", [1, 16, 32, 512])
def test_pieces_of_any_lengths_form_short_runs(block: int) -> None:
    draw = random.Random(block)
    for _ in range(100):
        pieces, at = [], block * draw.randrange(3)
        begin = at
        for _ in range(draw.randrange(1, 7)):
            pieces.append(
                piece(at, draw.choice([1, 7, 40, 300, 1500]), predicted=draw.random() < 0.5)
            )
            at = pieces[-1].end
        runs = list(group_runs(pieces, block))
        parts = [part for run in runs for part in run]
        assert [part.start for part in parts] == [begin, *(part.end for part in parts[:-1])]
        assert parts[-1].end == at
        assert all(run[0].start % block == 0 for run in runs)
        for run in runs:
            if len(run) > 1 or run[0].observations:
                assert run[-1].end - run[0].start <= max(MAX_PREDICTED_TOKENS, block)


def test_predicted_piece_is_cut_at_block_boundaries() -> None:
    found = list(group_runs([piece(40, 1200, predicted=True)], 32))
    cuts = [part.start for [part] in found]
    assert cuts == [40, *range(MAX_PREDICTED_TOKENS, 1240, MAX_PREDICTED_TOKENS)]
    assert all(cut % 32 == 0 for cut in cuts[1:])
    assert [run[0].observations[0].token_offset for run in found] == [5 + cut - 40 for cut in cuts]
    assert found[-1][0].end == 1240


def test_spliced_piece_is_not_cut() -> None:
    assert spans(piece(0, 4 * MAX_PREDICTED_TOKENS)) == [[(0, 4 * MAX_PREDICTED_TOKENS)]]


def test_ranks_predict_their_own_heads_with_weights_of_all_heads(tmp_path: Path) -> None:
    """Concatenated, they equal the prediction of one rank."""
    arena = TestArena(tmp_path / "arena", kv_format(4))
    whole = replace(FORM, layers=("0", "1"), num_kv_heads=4, head_dim=arena.form.head_dim)
    run = assembled_run(arena)
    rotary = parse_rotary({"rope_theta": 10_000.0}, whole.head_dim)

    def assembled(num_ranks: int, rank: int) -> torch.Tensor:
        form = replace(whole, num_ranks=num_ranks)
        exports = Arenas(form)
        found = SpanAssembler(form, exports, form.local_heads(rank)).assemble(run, rotary)
        exports.close()
        return found

    alone = assembled(1, 0)
    assert alone.shape == (2, 2, 4, 24, whole.head_dim)
    assert torch.equal(torch.cat([assembled(2, rank) for rank in range(2)], dim=2), alone)


def assembled_run(arena: TestArena) -> list[LoadPiece]:
    """A moved text, one predicted from two others, and one predicted from its KV in isolation."""
    slots = [arena.slot(20) for _ in range(5)]
    draw = np.random.default_rng(0)
    for slot in slots:
        num_bytes = arena.num_bytes(slot.num_tokens)
        values = draw.standard_normal(num_bytes // 4).astype("<f4")
        arena.bytes[slot.offset : slot.offset + num_bytes] = values.view(np.uint8)
    base, *others = slots
    first = LoadPiece(source=base, token_offset=2, num_tokens=10, start=0, shift=3)
    observations = [
        ObservedKv(
            real=real, token_offset=i, shift=7 * i, base=other, base_token_offset=i, weight=1.0
        )
        for i, (real, other) in enumerate(zip(others[:2], others[2:], strict=True))
    ]
    without_bases = [
        replace(observed, base=None, weight=weight)
        for observed, weight in zip(observations, (0.7, 0.3), strict=True)
    ]
    return [
        first,
        replace(first, start=10, num_tokens=9, observations=tuple(observations)),
        replace(first, start=19, num_tokens=5, observations=tuple(without_bases)),
    ]
