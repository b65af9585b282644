"""Which pieces are written together, by hand."""

from engine.kv.composing import MOST_TOKENS, runs_of
from engine.kv.place import Piece, Place, Seen

SOURCE = Place(arena="/arena", offset=0, words_offset=0, num_tokens=10_000)
SEEN = Seen(real=SOURCE, skip=5, shift=0, base=SOURCE, base_skip=0, weight=1.0)


def piece(start: int, num_tokens: int, *, predicted: bool = False) -> Piece:
    observed = (SEEN,) if predicted else ()
    return Piece(
        source=SOURCE, skip=0, num_tokens=num_tokens, start=start, shift=0, observed=observed
    )


def spans(*pieces: Piece) -> list[list[tuple[int, int]]]:
    return [[(part.start, part.end) for part in run] for run in runs_of(pieces, 32)]


def test_pieces_that_begin_with_a_block_are_written_alone() -> None:
    assert spans(piece(32, 20), piece(64, 32)) == [[(32, 52)], [(64, 96)]]


def test_pieces_that_share_a_block_are_written_together() -> None:
    pieces = (piece(0, 40), piece(40, 4), piece(44, 20), piece(64, 7))
    assert spans(*pieces) == [[(0, 40), (40, 44), (44, 64)], [(64, 71)]]


def test_what_is_predicted_is_cut_where_blocks_begin() -> None:
    found = list(runs_of([piece(40, 1200, predicted=True)], 32))
    cuts = [part.start for [part] in found]
    assert cuts == [40, *range(MOST_TOKENS, 1240, MOST_TOKENS)]
    assert all(cut % 32 == 0 for cut in cuts[1:])
    assert [run[0].observed[0].skip for run in found] == [5 + cut - 40 for cut in cuts]
    assert found[-1][0].end == 1240


def test_what_is_moved_whole_is_not_cut() -> None:
    assert spans(piece(0, 4 * MOST_TOKENS)) == [[(0, 4 * MOST_TOKENS)]]
