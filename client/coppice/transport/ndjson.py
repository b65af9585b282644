"""Incremental parser of newline-delimited JSON records."""

from collections.abc import Iterator

from pydantic import ValidationError

from coppice.errors import BadAnswer, StreamBroken
from coppice.wire.records import RECORD, EndRecord, Record


class NdjsonReader:
    """Parser of one stream. A record is complete when its line break has arrived."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.ended = False

    def feed(self, chunk: bytes) -> Iterator[Record]:
        self._buffer += chunk
        if b"\n" not in chunk:
            return
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            record = _record_of(line) if line.strip() else None
            if record is not None and not self.ended:
                self.ended = isinstance(record, EndRecord)
                yield record

    def finish(self) -> None:
        """Must be called at the end of the stream. Raises StreamBroken without an end record."""
        if not self.ended:
            raise StreamBroken("the stream ended without its last record")


def _record_of(line: bytearray) -> Record | None:
    """Parses a line; returns None for a record type that this version does not know."""
    try:
        return RECORD.validate_json(line)
    except ValidationError as error:
        if error.errors()[0]["type"] == "union_tag_invalid":
            return None
        raise BadAnswer(f"a line of the stream is no record: {error}") from error
