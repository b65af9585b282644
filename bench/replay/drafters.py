"""Drafters to compare in a replay: draft store, vLLM's n-grams, Arctic's suffix decoding."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kernels.draft_index.compiled_store import DraftStore
from kernels.draft_index.store_protocol import ALL_SCOPES, DraftBatch, Scope

ARCTIC = Path(__file__).parents[2] / ".arctic"


class Drafter(Protocol):
    def begin(self, group: bytes, prompt: Sequence[int]) -> int: ...

    def end(self, slot: int, came: Sequence[int]) -> None:
        """Add a response's last tokens, and stop drafting for it."""

    def age(self) -> None: ...

    def step(
        self, rows: Sequence[int], came: Sequence[Sequence[int]], max_draft_tokens: int
    ) -> DraftBatch:
        """Add the new tokens of each running response; returns drafts for all of them."""


class StoreDrafter:
    def __init__(
        self,
        *,
        scopes: frozenset[Scope] = ALL_SCOPES,
        ages: bool = True,
        max_draft_tokens: int = 16,
        max_bytes: int = 2**28,
    ) -> None:
        self.store = DraftStore(
            max_bytes=max_bytes, max_draft_tokens=max_draft_tokens, scopes=scopes
        )
        self._ages = ages

    def begin(self, group: bytes, prompt: Sequence[int]) -> int:
        return self.store.begin(group, np.array(prompt, np.int32))

    def end(self, slot: int, came: Sequence[int]) -> None:
        self.step([slot], [came], 0)
        self.store.end(slot, keep=True)

    def age(self) -> None:
        if self._ages:
            self.store.age()

    def step(
        self, rows: Sequence[int], came: Sequence[Sequence[int]], max_draft_tokens: int
    ) -> DraftBatch:
        return self.store.step(
            np.array(rows, np.int32),
            np.array([len(tokens) for tokens in came], np.int32),
            np.array([token for tokens in came for token in tokens], np.int32),
            np.full(len(rows), max_draft_tokens, np.int32),
        )


@dataclass(slots=True)
class NgramDrafter:
    """Drafter like `ngram` of vLLM 0.32, with prompt lookup of 2 to 4 tokens.

    The draft follows the earliest occurrence of the longest match in the request's own tokens.
    """

    shortest: int = 2
    longest_match: int = 4
    texts: list[list[int]] = field(default_factory=list)

    def begin(self, group: bytes, prompt: Sequence[int]) -> int:
        self.texts.append(list(prompt))
        return len(self.texts) - 1

    def end(self, slot: int, came: Sequence[int]) -> None:
        self.texts[slot] = []

    def age(self) -> None:
        """No-op: the n-gram drafter keeps no text between requests."""

    def step(
        self, rows: Sequence[int], came: Sequence[Sequence[int]], max_draft_tokens: int
    ) -> DraftBatch:
        for row, tokens in zip(rows, came, strict=True):
            self.texts[row] += tokens
        return drafted(
            [self.draft(self.texts[row], max_draft_tokens) for row in rows], max_draft_tokens
        )

    def draft(self, text: list[int], max_draft_tokens: int) -> list[int]:
        for length in range(self.longest_match, self.shortest - 1, -1):
            for end in range(length, len(text)):
                if text[end - length : end] == text[-length:]:
                    return text[end : end + max_draft_tokens]
        return []


class SuffixDrafter:
    """Arctic's suffix decoding as used by vLLM 0.32, with its defaults for other parameters."""

    DEPTH = 24

    def __init__(self, *, factor: float = 1.0, threshold: float = 0.1) -> None:
        if str(ARCTIC) not in sys.path:
            sys.path.append(str(ARCTIC))
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache: Any = SuffixDecodingCache(
            max_tree_depth=self.DEPTH, max_cached_requests=10_000
        )
        self._factor, self._least = factor, threshold
        self._texts: list[list[int]] = []

    def begin(self, group: bytes, prompt: Sequence[int]) -> int:
        slot = len(self._texts)
        self._texts.append(list(prompt))
        self._cache.start_request(slot, np.array(prompt, np.int32))
        return slot

    def end(self, slot: int, came: Sequence[int]) -> None:
        if came:
            self._cache.add_active_response(slot, np.array(came, np.int32))
        self._cache.stop_request(slot)

    def age(self) -> None:
        """No-op: suffix decoding does not distinguish weights versions."""

    def step(
        self, rows: Sequence[int], came: Sequence[Sequence[int]], max_draft_tokens: int
    ) -> DraftBatch:
        return drafted(
            [
                self._draft(row, tokens, max_draft_tokens)
                for row, tokens in zip(rows, came, strict=True)
            ],
            max_draft_tokens,
        )

    def _draft(self, slot: int, tokens: Sequence[int], max_draft_tokens: int) -> list[int]:
        """Add a request's new tokens and draft for it, one request after another as vLLM does."""
        text = self._texts[slot]
        if tokens:
            text += tokens
            self._cache.add_active_response(slot, np.array(tokens, np.int32))
        found: list[int] = self._cache.speculate(
            slot,
            np.array(text[-self.DEPTH :], np.int32),
            max_spec_tokens=max_draft_tokens,
            max_spec_factor=self._factor,
            min_token_prob=self._least,
        ).token_ids
        return found


def drafted(drafts: Sequence[Sequence[int]], max_draft_tokens: int) -> DraftBatch:
    """Convert drafted tokens to a DraftBatch, for drafters without probabilities."""
    found = DraftBatch.empty(len(drafts), max_draft_tokens)
    for row, draft in enumerate(drafts):
        found.lengths[row] = len(draft)
        found.tokens[row, : len(draft)] = draft
    return found
