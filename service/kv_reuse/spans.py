"""Prompt spans: validation, order and template of the pieces whose KV can be reused."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Final

import numpy as np

from coppice.wire.reuse import Reuse, ReuseMode
from coppice.wire.rollouts import Prompt, PromptSegment, RolloutRequest
from service.http.errors import InvalidRequest

MAX_SCOPES = 256
MAX_ORDERS = 256
PrefixOrder = tuple[bytes, ...]
DEFAULT_FIRST_TOKENS = 16
DEFAULT_THRESHOLD = 0.3
APPROXIMATE_MODES: Final[tuple[ReuseMode, ...]] = ("recompute", "anchors")
REUSE_OFF = Reuse(mode="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Piece of a prompt; its KV is reusable by other prompts only if it has a name."""

    token_ids: Sequence[int]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """Isolation scope of KV reuse: the API key and the cache salt."""

    owner: str
    salt: str | None


def digest(span: PromptSpan) -> bytes:
    return hashlib.sha256(np.asarray(span.token_ids, dtype="<i4").tobytes()).digest()


def joined(spans: Sequence[PromptSpan]) -> list[int]:
    return [token for span in spans for token in span.token_ids]


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
    """Sections of a prompt without its last token, which is always prefilled.

    Named spans vary, unnamed ones are fixed: prompts share a template if their unnamed texts up to
    the last named span are the same. The text after it may differ.
    """

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


class PrefixOrders:
    """LRU cache of the span orders of earlier prompts; runs on one event loop.

    An order is private to one scope and weights epoch, and is stored as digests of tokens. Whether
    the KV blocks of its prompt are still cached is not tracked.
    """

    def __init__(self, epoch: Callable[[], int]) -> None:
        self._epoch = epoch
        self._known: OrderedDict[tuple[Scope, int], OrderedDict[PrefixOrder, None]] = OrderedDict()

    def suggest(self, scope: Scope, spans: Sequence[PromptSpan]) -> list[int]:
        """Order of all spans as indices: named ones first, then the others in their given order."""
        named = {i: digest(span) for i, span in enumerate(spans) if span.name is not None}
        known = self._known.get((scope, self._epoch()), ())
        matches = (_match_prefix(order, named) for order in known)
        longest = max(matches, key=lambda matched: _num_tokens(matched, spans), default=[])
        used_indices = set(longest)
        rest = [i for i in named if i not in used_indices]
        return [*longest, *rest, *(i for i in range(len(spans)) if i not in named)]

    def remember(self, scope: Scope, spans: Sequence[PromptSpan]) -> None:
        """Store the order of the named spans that the prompt starts with.

        Text after the first unnamed span is specific to this prompt and is of no use to others.
        """
        order = []
        for span in spans:
            if span.name is None:
                break
            order.append(digest(span))
        if order:
            self._add(scope, tuple(order))

    def _add(self, scope: Scope, order: PrefixOrder) -> None:
        epoch = self._epoch()
        while self._known and next(iter(self._known))[1] != epoch:
            self._known.popitem(last=False)
        orders = self._known.setdefault((scope, epoch), OrderedDict())
        self._known.move_to_end((scope, epoch))
        orders[order] = None
        orders.move_to_end(order)
        if len(orders) > MAX_ORDERS:
            orders.popitem(last=False)
        if len(self._known) > MAX_SCOPES:
            self._known.popitem(last=False)


def _match_prefix(order: PrefixOrder, named: dict[int, bytes]) -> list[int]:
    """Indices of the spans that match the longest prefix of an order; each is used at most once."""
    left: dict[bytes, list[int]] = {}
    for i in reversed(named):
        left.setdefault(named[i], []).append(i)
    matched = list[int]()
    for wanted in order:
        if not left.get(wanted):
            break
        matched.append(left[wanted].pop())
    return matched


def _num_tokens(matched: Sequence[int], spans: Sequence[PromptSpan]) -> int:
    return sum(len(spans[i].token_ids) for i in matched)


def check(request: RolloutRequest) -> None:
    for group in request.groups:
        if group.prompt.segments is not None:
            _check_names(group.prompt.segments)
    reuse = request.reuse or REUSE_OFF
    if reuse.mode == "off":
        return
    if any(group.prompt.segments is None for group in request.groups):
        raise InvalidRequest("reuse needs prompts given as segments")
    if request.continue_from is not None:
        raise InvalidRequest("continue_from needs the unchanged prompt: set reuse.mode to off")
    if reuse.mode in APPROXIMATE_MODES:
        _check_approximate(request, reuse.mode)


def _check_approximate(request: RolloutRequest, mode: ReuseMode) -> None:
    if request.kv is not None:
        raise InvalidRequest(
            f"reuse.mode {mode} makes the prompt KV approximate, and approximate KV is not "
            "exported: leave out kv or reuse"
        )
    if request.adapter is not None:
        raise InvalidRequest(
            "KV of segments is cached for the base model only: set reuse.mode to off or order"
        )
    if request.branching is not None:
        raise InvalidRequest("branching excludes approximate reuse: set reuse.mode to off or order")


def _check_names(spans: Sequence[PromptSegment]) -> None:
    seen: dict[str, list[int]] = {}
    for span in spans:
        if span.reuse is None:
            continue
        if seen.setdefault(span.reuse, span.token_ids) != span.token_ids:
            raise InvalidRequest(f"segments named {span.reuse!r} differ within one prompt")


def spans_of_prompt(prompt: Prompt) -> list[PromptSpan]:
    assert prompt.segments is not None, "the prompt is given as spans"
    return [PromptSpan(token_ids=span.token_ids, name=span.reuse) for span in prompt.segments]
