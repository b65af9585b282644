"""Entries of the shared draft history: finished responses of one weights version, as bytes.

Numbers are little-endian. An entry has a header (magic, version's sequence number, number of
prompts, number of responses), then the uint32 arrays of prompt lengths, of numbers of responses per
prompt and of response lengths, then all prompts and all responses as int32. Every client with write
access to Redis can add entries, so everything is checked before it is used.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.types import DraftTexts

Tokens = NDArray[np.int32]

MAX_ENTRY_BYTES = 2**17
MAX_RESPONSES_PER_PROMPT = 128
"""The draft store keeps no more responses to one prompt."""
MAX_SEQUENCE = 2**62
MAGIC = b"CDH1"
HEADER = struct.Struct("<4sqII")


class MalformedEntry(Exception):
    """Bytes that are not an entry for this engine's vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedText:
    """Finished sample. `sequence` is the sequence number of its weights version."""

    sequence: int
    prompt: Sequence[int]
    response: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """Size of an entry with this response alone."""
        return HEADER.size + 4 * (3 + len(self.prompt) + len(self.response))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Responses of one weights version, by prompt."""

    sequence: int
    texts: tuple[tuple[Tokens, tuple[Tokens, ...]], ...]

    def draft_texts(self, age: int) -> list[DraftTexts]:
        return [
            DraftTexts(prompt=prompt, responses=responses, age=age)
            for prompt, responses in self.texts
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedEntry:
    data: bytes
    num_responses: int


@dataclass(slots=True)
class _Draft:
    """Entry that is being filled."""

    sequence: int
    texts: dict[bytes, list[bytes]] = field(default_factory=dict)
    num_bytes: int = HEADER.size

    def cost(self, prompt: bytes, response: bytes) -> int:
        """Bytes that a response adds to the entry."""
        new_prompt = 0 if prompt in self.texts else 8 + len(prompt)
        return new_prompt + 4 + len(response)

    def has_room(self, prompt: bytes, response: bytes) -> bool:
        is_full = len(self.texts.get(prompt, ())) == MAX_RESPONSES_PER_PROMPT
        return not is_full and self.num_bytes + self.cost(prompt, response) <= MAX_ENTRY_BYTES

    def add(self, prompt: bytes, response: bytes) -> None:
        self.num_bytes += self.cost(prompt, response)
        self.texts.setdefault(prompt, []).append(response)

    def encode(self) -> EncodedEntry:
        responses = [each for texts in self.texts.values() for each in texts]
        lengths = (
            [len(prompt) // 4 for prompt in self.texts],
            [len(texts) for texts in self.texts.values()],
            [len(response) // 4 for response in responses],
        )
        head = HEADER.pack(MAGIC, self.sequence, len(self.texts), len(responses))
        arrays = (np.array(each, "<u4").tobytes() for each in lengths)
        data = b"".join((head, *arrays, *self.texts, *responses))
        assert len(data) == self.num_bytes, "the size of an entry is counted"
        return EncodedEntry(data=data, num_responses=len(responses))


def encode(texts: Iterable[FinishedText]) -> list[EncodedEntry]:
    """Entries with these samples, each of one weights version and at most MAX_ENTRY_BYTES."""
    entries: list[EncodedEntry] = []
    drafts: dict[int, _Draft] = {}
    for text in texts:
        prompt, response = _to_bytes(text.prompt), _to_bytes(text.response)
        draft = drafts.setdefault(text.sequence, _Draft(text.sequence))
        if not draft.has_room(prompt, response):
            entries.append(draft.encode())
            draft = drafts[text.sequence] = _Draft(text.sequence)
        draft.add(prompt, response)
    return [*entries, *(draft.encode() for draft in drafts.values())]


def decode(data: bytes, vocab_size: int) -> Entry:
    """Entry of a serialized one. Raises MalformedEntry."""
    if not HEADER.size <= len(data) <= MAX_ENTRY_BYTES or len(data) % 4:
        raise MalformedEntry(f"{len(data)} bytes")
    magic, sequence, num_prompts, num_responses = HEADER.unpack_from(data)
    if magic != MAGIC or not 0 <= sequence <= MAX_SEQUENCE:
        raise MalformedEntry("wrong magic number or sequence")
    num_lengths = 2 * num_prompts + num_responses
    if 4 * num_lengths > len(data) - HEADER.size:
        raise MalformedEntry(f"truncated: {num_prompts} prompts, {num_responses} responses")
    lengths = np.frombuffer(data, "<u4", num_lengths, HEADER.size).astype(np.int64)
    tokens = np.frombuffer(data, "<i4", offset=HEADER.size + 4 * num_lengths).astype(np.int32)
    prompts, counts, responses = np.split(lengths, (num_prompts, 2 * num_prompts))
    _check(prompts, counts, responses, tokens, vocab_size)
    parts = _cut(tokens, np.concatenate([prompts, responses]))
    cut_prompts = [next(parts) for _ in range(num_prompts)]
    texts = tuple(
        (prompt, tuple(next(parts) for _ in range(count)))
        for prompt, count in zip(cut_prompts, counts.tolist(), strict=True)
    )
    return Entry(sequence=sequence, texts=texts)


def _check(
    prompts: NDArray[np.int64],
    counts: NDArray[np.int64],
    responses: NDArray[np.int64],
    tokens: Tokens,
    vocab_size: int,
) -> None:
    lengths = np.concatenate([prompts, responses])
    if not len(responses) or int(lengths.min()) < 1 or int(lengths.sum()) != len(tokens):
        raise MalformedEntry("inconsistent lengths")
    is_counted = int(counts.sum()) == len(responses) and int(counts.min()) >= 1
    if not is_counted or int(counts.max()) > MAX_RESPONSES_PER_PROMPT:
        raise MalformedEntry("inconsistent numbers of responses")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise MalformedEntry(f"token ids outside the vocabulary of {vocab_size}")


def _cut(tokens: Tokens, lengths: NDArray[np.int64]) -> Iterator[Tokens]:
    ends = lengths.cumsum()
    for begin, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
        yield tokens[begin:end]


def _to_bytes(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()
