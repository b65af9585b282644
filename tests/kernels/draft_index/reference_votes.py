"""Reference implementation of drafting by votes of positions with a matching context.

Each position votes for the token after it. The token with the largest weight is drafted; the
positions that voted for it remain, and vote on the next token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kernels.draft_index import store_protocol
from kernels.draft_index.store_protocol import Scope
from tests.kernels.draft_index.reference_texts import PromptRecord, ResponseLog, Text

MAX_MATCH_LENGTH = 32
"""Match lengths are capped at this number of tokens."""


def weight_of(match_length: int, age: int) -> int:
    """Weight of a matching text's vote for a draft token, in fixed point."""
    return (match_length * match_length << 16) // ((1 << store_protocol.AGE_SHIFT) + age)


def position_weight(distance: int) -> int:
    """Factor on the vote of another response to a prompt, larger if the positions are close.

    `distance` is that of the positions in both responses. The factor is 8 up to 4 tokens, 4 up to
    16, 2 up to 64, then 1.
    """
    return 8 >> min(3, max(0, (max(distance - 1, 0).bit_length() - 1) // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    after: Sequence[int]
    """The next token."""
    is_own: bool
    """In the text being drafted for: drafted tokens follow its end."""
    match_length: int
    scope: Scope
    weight: int

    def vote(self, draft: Sequence[int]) -> int | None:
        position = len(draft)
        if position < len(self.after):
            return self.after[position]
        return draft[position - len(self.after)] if self.is_own else None


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A token, and the match with the largest weight for it."""

    token: int
    scope: Scope
    match_length: int
    num_agreeing: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchFinder:
    """The requester, and the texts it may read."""

    record: PromptRecord
    text: Text
    log: ResponseLog
    prompt: int
    version: int
    scopes: frozenset[Scope]

    def find_matches(self) -> list[Match]:
        found: list[Match] = []
        next_order = MAX_MATCH_LENGTH + 1
        for order in store_protocol.ORDERS:
            if len(found) < store_protocol.MIN_VOTES:
                left = store_protocol.MAX_VOTES - len(found)
                found += islice(self._matches_in_record(order, next_order), left)
            next_order = order
        if max((place.match_length for place in found), default=0) < store_protocol.MISMATCH_BELOW:
            found += islice(self._matches_after_mismatch(), store_protocol.MAX_MISMATCH_VOTES)
        if Scope.ALL in self.scopes and len(found) < store_protocol.ALL_MIN_VOTES:
            found += islice(self._matches_in_log(), store_protocol.ALL_MAX_VOTES)
        return found

    def _matches_in_record(self, order: int, next_order: int) -> Iterator[Match]:
        for text, end in islice(
            self.record.find_matches(self.text.tokens, order), store_protocol.MAX_LOOKUPS
        ):
            match_length = common_suffix_length(text.tokens[:end], self.text.tokens)
            scope = self._scope(text)
            if not text.is_deleted and match_length < next_order and scope in self.scopes:
                yield self._make_match(text, end, match_length, scope)

    def _matches_after_mismatch(self) -> Iterator[Match]:
        *before, last = self.text.tokens
        for text, slip in islice(
            self.record.find_matches(before, store_protocol.ORDERS[0]), store_protocol.MAX_LOOKUPS
        ):
            scope = self._scope(text)
            if text.is_deleted or text.tokens[slip] == last or scope not in self.scopes:
                continue
            match_length = common_suffix_length(text.tokens[:slip], before)
            if slip + 1 < len(text.tokens):
                yield self._make_match(text, slip + 1, match_length, scope)

    def _matches_in_log(self) -> Iterator[Match]:
        for end, text in islice(
            self.log.find_matches(self.text.tokens), store_protocol.MAX_LOOKUPS
        ):
            if text.prompt != self.prompt:
                before = self.log.tokens[max(text.begin, self.log.tail) : end]
                match_length = common_suffix_length(before, self.text.tokens)
                after = self.log.tokens[end : text.end]
                weight = weight_of(match_length, self.version - text.version)
                yield Match(
                    after=after,
                    is_own=False,
                    match_length=match_length,
                    scope=Scope.ALL,
                    weight=weight,
                )

    def _make_match(self, text: Text, end: int, match_length: int, scope: Scope) -> Match:
        weight = weight_of(match_length, self.version - text.version)
        if scope is not Scope.SELF:
            weight *= position_weight(abs(len(self.text.tokens) - end))
        is_own = text is self.text
        return Match(
            after=text.tokens[end:],
            is_own=is_own,
            match_length=match_length,
            scope=scope,
            weight=weight,
        )

    def _scope(self, text: Text) -> Scope:
        if text is self.text or text is self.record.prompt:
            return Scope.SELF
        return Scope.SIBLINGS if text.group == self.text.group else Scope.PROMPT


def common_suffix_length(one: Sequence[int], other: Sequence[int]) -> int:
    most = min(len(one), len(other), MAX_MATCH_LENGTH)
    return next((i for i in range(most) if one[-1 - i] != other[-1 - i]), most)


def vote_tokens(matches: list[Match], limit: int) -> Iterator[DraftedToken]:
    draft: list[int] = []
    while len(draft) < limit:
        votes = [(place, token) for place in matches if (token := place.vote(draft)) is not None]
        if not votes:
            return
        weights: dict[int, int] = {}
        for place, token in votes:
            weights[token] = weights.get(token, 0) + place.weight
        best_token = max(weights, key=weights.__getitem__)  # the first of equal ones
        matches = [place for place, token in votes if token == best_token]
        best = max(matches, key=lambda place: place.weight)
        yield DraftedToken(best_token, best.scope, best.match_length, len(matches), len(votes))
        draft.append(best_token)
