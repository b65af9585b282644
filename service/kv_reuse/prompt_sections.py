"""Prompt spans, parts of a prompt whose KV can be reused: their validation, order and template.

A span with a cache key is called keyed, a span without cache key is called plain.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Final

import numpy as np

from coppice.wire.kv_reuse import KvReuse, KvReuseMode
from coppice.wire.rollouts import PromptSpan, RolloutRequest
from service.http.errors import InvalidRequest

MAX_SCOPES = 256
MAX_ORDERS = 256
PrefixOrder = tuple[bytes, ...]
DEFAULT_RECOMPUTE_TOKENS = 16
DEFAULT_MAX_ENTROPY = 0.3
APPROXIMATE_MODES: Final[tuple[KvReuseMode, ...]] = ("splice", "predict")
REUSE_OFF = KvReuse(mode="off")


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


class PrefixOrders:
    """LRU cache of the span orders of earlier prompts, to reorder prompts for prefix-cache hits.

    An order is private to one scope and weights epoch, and is stored as digests of tokens. Whether
    the KV blocks of an order's prompt are still cached is not tracked. Runs on one event loop.
    """

    def __init__(self, epoch: Callable[[], int]) -> None:
        self._epoch = epoch
        self._known: OrderedDict[tuple[Scope, int], OrderedDict[PrefixOrder, None]] = OrderedDict()

    def suggest(self, scope: Scope, spans: Sequence[PromptSpan]) -> list[int]:
        """Order of a prompt's spans, as indices, that starts like an earlier prompt if possible.

        All keyed spans come first, then the others in their given order.
        """
        keyed = {
            i: digest(span.token_ids) for i, span in enumerate(spans) if span.cache_key is not None
        }
        known = self._known.get((scope, self._epoch()), ())
        matches = (_match_prefix(order, keyed) for order in known)
        longest = max(matches, key=lambda matched: _num_tokens(matched, spans), default=[])
        used_indices = set(longest)
        rest = [i for i in keyed if i not in used_indices]
        return [*longest, *rest, *(i for i in range(len(spans)) if i not in keyed)]

    def remember(self, scope: Scope, spans: Sequence[PromptSpan]) -> None:
        """Store the order of the keyed spans at the start of a prompt, for later prompts.

        Text after the first plain span is specific to this prompt and is of no use to others.
        """
        order = []
        for span in spans:
            if span.cache_key is None:
                break
            order.append(digest(span.token_ids))
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


def _match_prefix(order: PrefixOrder, keyed: dict[int, bytes]) -> list[int]:
    """Indices of the spans that match the start of an earlier prompt, in that prompt's order.

    Each span is used at most once.
    """
    left: dict[bytes, list[int]] = {}
    for i in reversed(keyed):
        left.setdefault(keyed[i], []).append(i)
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
        if group.prompt.spans is not None:
            _check_names(group.prompt.spans)
    reuse = request.kv_reuse or REUSE_OFF
    if reuse.mode == "off":
        return
    if any(group.prompt.spans is None for group in request.groups):
        raise InvalidRequest("kv_reuse needs prompts given as spans")
    if request.continue_from is not None:
        raise InvalidRequest("continue_from needs the unchanged prompt: set kv_reuse.mode to off")
    if reuse.mode in APPROXIMATE_MODES:
        _check_approximate(request, reuse.mode)


def _check_approximate(request: RolloutRequest, mode: KvReuseMode) -> None:
    if request.kv is not None:
        raise InvalidRequest(
            f"kv_reuse.mode {mode} makes the prompt KV approximate, and approximate KV is not "
            "exported: leave out kv or kv_reuse"
        )
    if request.adapter is not None:
        raise InvalidRequest(
            "KV of spans is cached for the base model only: set kv_reuse.mode to off or reorder"
        )
    if request.branching is not None:
        raise InvalidRequest("branching needs kv_reuse.mode off or reorder")


def _check_names(spans: Sequence[PromptSpan]) -> None:
    seen: dict[str, list[int]] = {}
    for span in spans:
        if span.cache_key is None:
            continue
        if seen.setdefault(span.cache_key, span.token_ids) != span.token_ids:
            raise InvalidRequest(f"spans of cache_key {span.cache_key!r} differ within one prompt")
