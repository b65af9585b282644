"""Template of a prompt given as spans: its sections with and without a cache key.

A span with a cache key is called keyed, a span without cache key is called plain.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from coppice.wire.rollouts import PromptSpan


@dataclass(frozen=True, slots=True)
class Scope:
    """Isolation scope of KV reuse (API key and cache salt): KV is not reused across scopes."""

    owner: str
    salt: str | None


def digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).digest()


def joined(spans: Sequence[PromptSpan]) -> list[int]:
    return [token for span in spans for token in span.token_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSection:
    """Section of a prompt: one span with a cache key, or consecutive spans without cache keys.

    It has the tokens [start, end). `text_digest` is the digest of the complete text, including a
    last token of the prompt that is outside of [start, end).
    """

    start: int
    end: int
    cache_key: str | None
    text_digest: bytes

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Prompt divided into sections by cache key, without the last token, which is prefilled.

    Prompts are of the same template if they have the same cache keys and the same plain texts up to
    the last keyed span. The texts of keyed spans, and the text after the last one, may differ.
    """

    sections: tuple[TemplateSection, ...]

    @cached_property
    def context(self) -> bytes:
        """Digest of what prompts of a template share: cache keys, and texts without cache key."""
        known = hashlib.sha256()
        for section in self.sections[: self.num_template_sections]:
            content = (
                section.text_digest if section.cache_key is None else section.cache_key.encode()
            )
            known.update(b"%d %d " % (section.cache_key is None, len(content)) + content)
        return known.digest()

    @cached_property
    def num_template_sections(self) -> int:
        """Number of sections up to and including the last one with a cache key."""
        keyed = [i for i, section in enumerate(self.sections) if section.cache_key is not None]
        return keyed[-1] + 1 if keyed else 0

    @property
    def num_tokens(self) -> int:
        return self.sections[-1].end

    def has_same_prefix(self, other: "PromptTemplate", num: int) -> bool:
        """True if the first `num` sections of two prompts have the same texts."""
        ours, theirs = self.sections[:num], other.sections[:num]
        return [s.text_digest for s in ours] == [s.text_digest for s in theirs]


def template_of(spans: Sequence[PromptSpan]) -> PromptTemplate:
    last = sum(len(span.token_ids) for span in spans) - 1
    sections: list[TemplateSection] = []
    at = 0
    for combined in _merge_plain(spans):
        tokens = joined(combined)
        sections.append(
            TemplateSection(
                start=min(at, last),
                end=min(at + len(tokens), last),
                cache_key=combined[0].cache_key,
                text_digest=digest(tokens),
            )
        )
        at += len(tokens)
    return PromptTemplate(sections=tuple(sections))


def _merge_plain(spans: Sequence[PromptSpan]) -> list[list[PromptSpan]]:
    """Put each span with a cache key alone, and consecutive spans without one together."""
    keys = [
        (i, span.cache_key) if span.cache_key is not None else None for i, span in enumerate(spans)
    ]
    return [
        [span for _, span in group]
        for _, group in groupby(zip(keys, spans, strict=True), key=lambda pair: pair[0])
    ]
