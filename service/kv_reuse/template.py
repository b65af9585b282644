"""A prompt as its context and what changes in it from time to time.

Texts with a name change, those without one stay: prompts of one shape are those whose nameless
texts are the same up to the last name. What comes behind that may differ.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from service.kv_reuse.layout import PromptSpan, joined
from service.kv_reuse.prefix_order import digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSection:
    """Tokens start..end (end excluded) of a prompt, of one named segment, or of all nameless ones
    between two. `text_digest` is the digest of the whole of it."""

    start: int
    end: int
    name: str | None
    text_digest: bytes

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """All of a prompt but its last token, which is always computed."""

    sections: tuple[TemplateSection, ...]

    @cached_property
    def context(self) -> bytes:
        """What a shape is known by."""
        known = hashlib.sha256()
        for section in self.sections[: self.num_template_sections]:
            content = section.text_digest if section.name is None else section.name.encode()
            known.update(b"%d %d " % (section.name is None, len(content)) + content)
        return known.digest()

    @cached_property
    def num_template_sections(self) -> int:
        """Stretches up to the last that has a name."""
        named = [i for i, section in enumerate(self.sections) if section.name is not None]
        return named[-1] + 1 if named else 0

    @property
    def num_tokens(self) -> int:
        return self.sections[-1].end

    def has_same_prefix(self, other: "PromptTemplate", num: int) -> bool:
        """The first `num` stretches are the same texts."""
        ours, theirs = self.sections[:num], other.sections[:num]
        return [s.text_digest for s in ours] == [s.text_digest for s in theirs]


def template_of(spans: Sequence[PromptSpan]) -> PromptTemplate:
    last = sum(len(span.token_ids) for span in spans) - 1
    sections: list[TemplateSection] = []
    at = 0
    for combined in _merge_unnamed(spans):
        tokens = joined(combined)
        whole = PromptSpan(token_ids=tokens, name=combined[0].name)
        sections.append(
            TemplateSection(
                start=min(at, last),
                end=min(at + len(tokens), last),
                name=whole.name,
                text_digest=digest(whole),
            )
        )
        at += len(tokens)
    return PromptTemplate(sections=tuple(sections))


def _merge_unnamed(spans: Sequence[PromptSpan]) -> list[list[PromptSpan]]:
    """Nameless ones that follow one another are one."""
    keys = [(i, span.name) if span.name is not None else None for i, span in enumerate(spans)]
    return [
        [span for _, span in group]
        for _, group in groupby(zip(keys, spans, strict=True), key=lambda pair: pair[0])
    ]
