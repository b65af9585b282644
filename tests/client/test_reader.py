from hypothesis import given
from hypothesis import strategies as st

from coppice import Record
from coppice.operations.record_stream import NdjsonReader
from tests.client.answers import LINES, RECORDS

WHOLE = b"".join(LINES)


@given(st.lists(st.integers(0, len(WHOLE))))
def test_records_do_not_depend_on_chunk_boundaries(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(WHOLE)]
    reader = NdjsonReader()
    records: list[Record] = []
    for start, end in zip(borders, borders[1:], strict=False):
        records += reader.feed(WHOLE[start:end])
    reader.finish()
    assert records == RECORDS


def test_empty_lines_and_unknown_records_are_skipped() -> None:
    reader = NdjsonReader()
    lines = [LINES[0], b"\n", b'{"type": "handle", "handle": "h1"}\r\n', LINES[-1]]
    assert list(reader.feed(b"".join(lines))) == [RECORDS[0], RECORDS[-1]]
