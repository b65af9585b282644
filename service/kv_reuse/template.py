"""Prompt templates: the fixed context of a prompt and its variable spans.

Named spans vary, unnamed spans are fixed: prompts share a template if their unnamed texts up to the
last named span are the same. The text after it may differ.
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
    """Tokens [start, end) of one named span or of consecutive unnamed ones.

    `text_digest` is the digest of the complete text, including a last token of the prompt that is
    outside of [start, end).
    """

    start: int
    end: int
    name: str | None
    text_digest: bytes

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Sections of a prompt without its last token, which is always prefilled."""

    sections: tuple[TemplateSection, ...]

    @cached_property
    def context(self) -> bytes:
        """Digest of the template: names of the named sections, texts of the unnamed ones."""
        known = hashlib.sha256()
        for section in self.sections[: self.num_template_sections]:
            content = section.text_digest if section.name is None else section.name.encode()
            known.update(b"%d %d " % (section.name is None, len(content)) + content)
        return known.digest()

    @cached_property
    def num_template_sections(self) -> int:
        """Number of sections up to and including the last named one."""
        named = [i for i, section in enumerate(self.sections) if section.name is not None]
        return named[-1] + 1 if named else 0

    @property
    def num_tokens(self) -> int:
        return self.sections[-1].end

    def has_same_prefix(self, other: "PromptTemplate", num: int) -> bool:
        """True if the first `num` sections have the same texts."""
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
    """Groups of spans: consecutive unnamed ones are merged."""
    keys = [(i, span.name) if span.name is not None else None for i, span in enumerate(spans)]
    return [
        [span for _, span in group]
        for _, group in groupby(zip(keys, spans, strict=True), key=lambda pair: pair[0])
    ]
