"""File format of a draft store; docs/concepts/sibling-drafts.md specifies it byte by byte.

A store is written to a temporary file that then replaces the old file atomically. When it is read,
the whole file is validated before it is used.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernels.draft_index.store_protocol import (
    MAX_COARSE_COUNT,
    MAX_COUNT,
    MAX_FINISHED_TEXTS,
    MAX_MATCH_LENGTH,
    MAX_TEXT_TOKENS,
    NUM_CELLS,
    NUM_COARSE_CELLS,
    InvalidStoreFile,
)

MAGIC = b"COPPICED"
FORMAT = 1
HEADER = struct.Struct("<8sII")
"""Magic, format version, number of arrays."""
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class StoredText:
    tokens: NDArray[np.int32]
    age: int
    group: int
    """Key of the group; in the log, the key of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreContents:
    """Contents of a draft store file: prompts, finished responses and acceptance counts.

    Prompts are in order of last use, most recent last.
    """

    prompt_lengths: NDArray[np.uint32]
    prompt_tokens: NDArray[np.int32]
    text_counts: NDArray[np.uint32]
    """Number of finished responses per prompt; the responses follow in the order they finished."""
    text_lengths: NDArray[np.uint32]
    text_ages: NDArray[np.uint32]
    text_groups: NDArray[np.uint64]
    text_tokens: NDArray[np.int32]
    log_lengths: NDArray[np.uint32]
    """Log of the latest finished responses to any prompt, each preceded by its prompt's end."""
    log_ages: NDArray[np.uint32]
    log_prompts: NDArray[np.uint64]
    log_tokens: NDArray[np.int32]
    tried: NDArray[np.uint32]
    accepted: NDArray[np.uint32]
    coarse_tried: NDArray[np.uint32]
    coarse_accepted: NDArray[np.uint32]

    def iter_prompts(self) -> Iterator[NDArray[np.int32]]:
        begin = 0
        for length in self.prompt_lengths.tolist():
            yield self.prompt_tokens[begin : begin + length]
            begin += length

    def prompts(self) -> Iterator[tuple[NDArray[np.int32], list[StoredText]]]:
        texts = _split_texts(self.text_tokens, self.text_lengths, self.text_ages, self.text_groups)
        for prompt, count in zip(self.iter_prompts(), self.text_counts.tolist(), strict=True):
            yield prompt, list(islice(texts, count))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays of the file by name, in file order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def log(self) -> Iterator[StoredText]:
        return _split_texts(self.log_tokens, self.log_lengths, self.log_ages, self.log_prompts)

    def check(self) -> None:
        """Validate the lengths and values of all arrays; raises InvalidStoreFile.

        A correct digest does not prove a trusted writer.
        """
        pairs = (
            (self.prompt_lengths.sum(dtype=np.uint64), self.prompt_tokens),
            (self.text_counts.sum(dtype=np.uint64), self.text_lengths),
            (self.text_lengths.sum(dtype=np.uint64), self.text_tokens),
            (self.log_lengths.sum(dtype=np.uint64), self.log_tokens),
        )
        equal_lengths = (
            (self.prompt_lengths, self.text_counts),
            (self.text_lengths, self.text_ages),
            (self.text_lengths, self.text_groups),
            (self.log_lengths, self.log_ages),
            (self.log_lengths, self.log_prompts),
        )
        cells = (
            (self.tried, NUM_CELLS),
            (self.accepted, NUM_CELLS),
            (self.coarse_tried, NUM_COARSE_CELLS),
            (self.coarse_accepted, NUM_COARSE_CELLS),
        )
        is_valid = all(int(total) == len(array) for total, array in pairs)
        is_valid &= all(len(one) == len(other) for one, other in equal_lengths)
        is_valid &= all(len(array) == number for array, number in cells)
        is_valid &= all(
            (at < end).all() and (at >= begin).all() for at, begin, end in self._bounds()
        )
        if not (is_valid and self._has_unique_prompts()):
            raise InvalidStoreFile("inconsistent arrays")

    def _bounds(self) -> Iterator[tuple[NDArray[Any], int, Any]]:
        """Each array to check, with the half-open range of its valid values."""
        yield self.prompt_lengths, 1, MAX_TEXT_TOKENS
        yield self.text_counts, 0, MAX_FINISHED_TEXTS + 1
        yield self.text_lengths, 1, MAX_TEXT_TOKENS - MAX_MATCH_LENGTH
        yield self.log_lengths, 1, 2**32
        for tokens in (self.prompt_tokens, self.text_tokens, self.log_tokens):
            yield tokens, 0, 2**31
        yield self.tried, 0, MAX_COUNT
        yield self.coarse_tried, 0, MAX_COARSE_COUNT
        yield self.accepted, 0, self.tried + 1
        yield self.coarse_accepted, 0, self.coarse_tried + 1

    def _has_unique_prompts(self) -> bool:
        return len({prompt.tobytes() for prompt in self.iter_prompts()}) == len(self.prompt_lengths)

    def _largest_token(self) -> int:
        tokens = (self.prompt_tokens, self.text_tokens, self.log_tokens)
        return max((int(array.max()) for array in tokens if len(array)), default=0)

    def write(self, path: Path) -> None:
        temp_path = path.with_name(f"{path.name}.{os.getpid()}.writing")
        try:
            with temp_path.open("wb") as file:
                digest = blake2b(digest_size=DIGEST_BYTES)
                for part in self._serialize():
                    digest.update(part)
                    file.write(part)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            temp_path.replace(path)
        finally:
            temp_path.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _serialize(self) -> list[bytes]:
        arrays = list(self.arrays().values())
        lengths = np.array([len(array) for array in arrays], "<u8")
        head = HEADER.pack(MAGIC, FORMAT, len(arrays)) + lengths.tobytes()
        return [head, *(array.tobytes() for array in arrays)]

    @classmethod
    def read(cls, path: Path, vocabulary: int | None = None) -> Self:
        try:
            contents = cls._parse(path.read_bytes())
            if vocabulary is not None and contents._largest_token() >= vocabulary:
                raise InvalidStoreFile(f"token ids outside the vocabulary of {vocabulary}")
            return contents
        except InvalidStoreFile as error:
            raise InvalidStoreFile(f"{path} is not a readable draft store: {error}") from None

    @classmethod
    def _parse(cls, data: bytes) -> Self:
        lengths, at = _lengths(data), HEADER.size + 8 * len(fields(cls))
        sizes = [
            length * np.dtype(_dtype(field.name)).itemsize
            for field, length in zip(fields(cls), lengths, strict=True)
        ]
        whole = at + sum(sizes) + DIGEST_BYTES
        if len(data) != whole:
            raise InvalidStoreFile(f"truncated: {len(data)} of {whole} bytes")
        body = memoryview(data)[:-DIGEST_BYTES]
        if blake2b(body, digest_size=DIGEST_BYTES).digest() != data[-DIGEST_BYTES:]:
            raise InvalidStoreFile("checksum mismatch")
        arrays = {}
        for field, length in zip(fields(cls), lengths, strict=True):
            arrays[field.name] = np.frombuffer(data, _dtype(field.name), length, at)
            at += arrays[field.name].nbytes
        contents = cls(**arrays)
        contents.check()
        return contents


def _split_texts(
    tokens: NDArray[np.int32],
    lengths: NDArray[np.uint32],
    ages: NDArray[np.uint32],
    groups: NDArray[np.uint64],
) -> Iterator[StoredText]:
    begin = 0
    columns = zip(lengths.tolist(), ages.tolist(), groups.tolist(), strict=True)
    for length, age, group in columns:
        yield StoredText(tokens[begin : begin + length], age, group)
        begin += length


def _dtype(name: str) -> str:
    if name.endswith("_tokens"):
        return "<i4"
    return "<u8" if name in ("text_groups", "log_prompts") else "<u4"


def _lengths(data: bytes) -> list[int]:
    number = len(fields(StoreContents))
    if len(data) < HEADER.size + 8 * number + DIGEST_BYTES:
        raise InvalidStoreFile(f"truncated: {len(data)} bytes")
    magic, version, arrays = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise InvalidStoreFile("wrong magic number")
    if (version, arrays) != (FORMAT, number):
        raise InvalidStoreFile(f"format version {version}, expected {FORMAT}")
    lengths: list[int] = np.frombuffer(data, "<u8", number, HEADER.size).tolist()
    return lengths
