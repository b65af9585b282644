"""A prompt as its context and what changes in it from time to time.

Texts with a name change, those without one stay: prompts of one shape are those whose nameless
texts are the same up to the last name. What comes behind that may differ.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from service.kv_reuse.layout import Part, joined
from service.kv_reuse.prefix_order import digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tokens start..end (end excluded) of a prompt, of one named segment, or of all nameless ones
    between two. `text` is the digest of the whole of it."""

    start: int
    end: int
    name: str | None
    text: bytes

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All of a prompt but its last token, which is always computed."""

    stretches: tuple[Stretch, ...]

    @cached_property
    def context(self) -> bytes:
        """What a shape is known by."""
        known = hashlib.sha256()
        for stretch in self.stretches[: self.num_shared]:
            word = stretch.text if stretch.name is None else stretch.name.encode()
            known.update(b"%d %d " % (stretch.name is None, len(word)) + word)
        return known.digest()

    @cached_property
    def num_shared(self) -> int:
        """Stretches up to the last that has a name."""
        named = [i for i, stretch in enumerate(self.stretches) if stretch.name is not None]
        return named[-1] + 1 if named else 0

    @property
    def num_tokens(self) -> int:
        return self.stretches[-1].end

    def begins_like(self, other: "Shape", num: int) -> bool:
        """The first `num` stretches are the same texts."""
        ours, theirs = self.stretches[:num], other.stretches[:num]
        return [s.text for s in ours] == [s.text for s in theirs]


def shape_of(parts: Sequence[Part]) -> Shape:
    last = sum(len(part.token_ids) for part in parts) - 1
    stretches: list[Stretch] = []
    at = 0
    for together in _stretches(parts):
        tokens = joined(together)
        whole = Part(token_ids=tokens, name=together[0].name)
        stretches.append(
            Stretch(
                start=min(at, last),
                end=min(at + len(tokens), last),
                name=whole.name,
                text=digest(whole),
            )
        )
        at += len(tokens)
    return Shape(stretches=tuple(stretches))


def _stretches(parts: Sequence[Part]) -> list[list[Part]]:
    """Nameless ones that follow one another are one."""
    keys = [(i, part.name) if part.name is not None else None for i, part in enumerate(parts)]
    return [
        [part for _, part in group]
        for _, group in groupby(zip(keys, parts, strict=True), key=lambda pair: pair[0])
    ]
