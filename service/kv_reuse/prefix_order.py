"""Order of prompt spans that maximizes the prefix shared with earlier prompts.

Orders are private to one API key, cache salt and weights epoch. Only the orders are stored, as
digests of tokens; whether their KV blocks are still cached is not tracked here.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from service.kv_reuse.layout import PromptSpan

MAX_SCOPES = 256
MAX_ORDERS = 256

PrefixOrder = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """Isolation scope of KV reuse: the API key and the cache salt."""

    owner: str
    salt: str | None


def digest(span: PromptSpan) -> bytes:
    return hashlib.sha256(np.asarray(span.token_ids, dtype="<i4").tobytes()).digest()


class PrefixOrders:
    """LRU cache of span orders, dropped when the weights change; runs on one event loop."""

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
