"""A draft out of the places that resemble where a request has come to, slowly.

Each place votes for the token that came after it. The heaviest token is drafted, the places that
voted for it stay, and vote on what comes next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kernels.draft_index import params
from kernels.draft_index.interface import Scope
from tests.kernels.draft_index.reference_texts import Log, Record, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    after: Sequence[int]
    """What came next."""
    own: bool
    """In the text that is drafted for: past its end come the drafted tokens themselves."""
    matched: int
    scope: Scope
    weight: int

    def vote(self, draft: Sequence[int]) -> int | None:
        position = len(draft)
        if position < len(self.after):
            return self.after[position]
        return draft[position - len(self.after)] if self.own else None


@dataclass(frozen=True, slots=True)
class Elected:
    """A token, and whose vote weighed most."""

    token: int
    scope: Scope
    matched: int
    agreeing: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who asks, and what may be read."""

    record: Record
    text: Text
    log: Log
    prompt: int
    version: int
    scopes: frozenset[Scope]

    def places(self) -> list[Place]:
        found: list[Place] = []
        longer = params.LONGEST_MATCH + 1
        for order in params.ORDERS:
            if len(found) < params.ENOUGH:
                left = params.PLACES - len(found)
                found += islice(self._in_record(order, longer), left)
            longer = order
        if max((place.matched for place in found), default=0) < params.SKIP_BELOW:
            found += islice(self._behind_a_slip(), params.SKIP_PLACES)
        if Scope.ALL in self.scopes and len(found) < params.ALL_ENOUGH:
            found += islice(self._in_log(), params.ALL_PLACES)
        return found

    def _in_record(self, order: int, longer: int) -> Iterator[Place]:
        for text, end in islice(self.record.places(self.text.tokens, order), params.LOOKS):
            matched = common_end(text.tokens[:end], self.text.tokens)
            scope = self._scope(text)
            if not text.dead and matched < longer and scope in self.scopes:
                yield self._place(text, end, matched, scope)

    def _behind_a_slip(self) -> Iterator[Place]:
        *before, last = self.text.tokens
        for text, slip in islice(self.record.places(before, params.ORDERS[0]), params.LOOKS):
            scope = self._scope(text)
            if text.dead or text.tokens[slip] == last or scope not in self.scopes:
                continue
            matched = common_end(text.tokens[:slip], before)
            if slip + 1 < len(text.tokens):
                yield self._place(text, slip + 1, matched, scope)

    def _in_log(self) -> Iterator[Place]:
        for end, text in islice(self.log.places(self.text.tokens), params.LOOKS):
            if text.prompt != self.prompt:
                before = self.log.tokens[max(text.begin, self.log.tail) : end]
                matched = common_end(before, self.text.tokens)
                after = self.log.tokens[end : text.end]
                weight = params.weight(matched, self.version - text.version)
                yield Place(after=after, own=False, matched=matched, scope=Scope.ALL, weight=weight)

    def _place(self, text: Text, end: int, matched: int, scope: Scope) -> Place:
        weight = params.weight(matched, self.version - text.version)
        if scope is not Scope.SELF:
            weight *= params.nearness(abs(len(self.text.tokens) - end))
        own = text is self.text
        return Place(after=text.tokens[end:], own=own, matched=matched, scope=scope, weight=weight)

    def _scope(self, text: Text) -> Scope:
        if text is self.text or text is self.record.prompt:
            return Scope.SELF
        return Scope.SIBLINGS if text.group == self.text.group else Scope.PROMPT


def common_end(one: Sequence[int], other: Sequence[int]) -> int:
    most = min(len(one), len(other), params.LONGEST_MATCH)
    return next((i for i in range(most) if one[-1 - i] != other[-1 - i]), most)


def elect(places: list[Place], limit: int) -> Iterator[Elected]:
    draft: list[int] = []
    while len(draft) < limit:
        votes = [(place, token) for place in places if (token := place.vote(draft)) is not None]
        if not votes:
            return
        weights: dict[int, int] = {}
        for place, token in votes:
            weights[token] = weights.get(token, 0) + place.weight
        elected = max(weights, key=weights.__getitem__)  # of equals the first
        places = [place for place, token in votes if token == elected]
        best = max(places, key=lambda place: place.weight)
        yield Elected(elected, best.scope, best.matched, len(places), len(votes))
        draft.append(elected)
