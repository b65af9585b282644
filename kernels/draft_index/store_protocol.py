"""Protocol, parameters and argument checks of the draft store.

Parameters of drafting are passed to the compiled store when it is created. They were tuned on
recorded rollouts: docs/decisions/2026-11-20-drafts.md. Both implementations check their arguments
with `check_begin` and `check_step`.
"""

from dataclasses import dataclass, fields
from enum import IntEnum
from hashlib import blake2b
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class InvalidCall(Exception):
    """Invalid argument of a call, such as an unused slot or a negative token; it has no effect."""


MAX_DRAFT_TOKENS = 32
"""Upper bound of `max_draft_tokens`."""
ORDERS = (4, 2, 1)
"""n-gram orders of the index of one prompt's texts, looked up from the longest."""
MAX_LOOKUPS = 24
"""Maximum number of the latest occurrences of an n-gram that are examined."""
MAX_VOTES = 16
"""Maximum number of matches in one prompt's texts that vote."""
MIN_VOTES = 4
"""Shorter orders are looked up only while fewer matches than this were found."""
MISMATCH_BELOW = 8
"""If no match has this length, the last token may be a mismatch in an otherwise similar text, so
the ORDERS[0] tokens before it are looked up as well."""
MAX_MISMATCH_VOTES = 8
"""Maximum number of matches from that lookup that vote."""
ALL_ORDER = 6
"""n-gram order of the index of finished responses to any prompt."""
ALL_MAX_VOTES = 8
ALL_MIN_VOTES = 4
"""Responses to other prompts are searched only if the same prompt has fewer matches than this."""
MAX_FINISHED_TEXTS = 128
"""Maximum number of finished responses stored per prompt."""
MAX_TEXTS = 2048
"""Maximum number of texts per prompt, including the prompt itself."""
TOO_MANY_TEXTS = f"a prompt has at most {MAX_TEXTS - 1} running responses"
MAX_TEXT_TOKENS = 2**21
AGE_SHIFT = 2
"""A vote's weight is divided by 1 + age / 2**AGE_SHIFT."""
NUM_SCOPES = 4
# Bytes charged against `max_bytes`: upper bounds of what tables and vectors take after growth.
PROMPT_BYTES = 1024
TEXT_BYTES = 160
TOKEN_BYTES = 104
LOG_TOKEN_BYTES = 64
LOG_SHARE = 4
"""The log of responses to any prompt gets 1 / LOG_SHARE of `max_bytes`."""


def log_tokens(max_bytes: int) -> int:
    """Capacity in tokens of a draft store's log of finished responses, a power of two."""
    return 1 << max(6, (max_bytes // LOG_SHARE // LOG_TOKEN_BYTES).bit_length() - 1)


NUM_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Reliability diagram of drafted tokens: outcomes by scope and predicted probability.

    The probability is divided into NUM_BINS equal bins. A drafted token counts if all tokens before
    it in its draft were correct, whether it was submitted for verification or not. It is compared
    with the tokens that were generated.
    """

    tried: NDArray[np.int64]
    """[scopes, bins]"""
    accepted: NDArray[np.int64]
    predicted: NDArray[np.float64]
    """Sum of the predicted probabilities; divided by `tried`, the mean prediction of the bin."""

    def error(self) -> float:
        """Expected calibration error over all drafted tokens."""
        tried = self.tried.sum(axis=0)
        differences = np.abs(self.predicted.sum(axis=0) - self.accepted.sum(axis=0))
        return float(differences.sum() / max(int(tried.sum()), 1))


Int32Array = NDArray[np.int32]


class Scope(IntEnum):
    """Text from which a token was drafted, by its relation to the request."""

    SELF = 0
    """The request's own prompt or response."""
    SIBLINGS = 1
    """A response of the same group, running or finished."""
    PROMPT = 2
    """A response to the same prompt in another group, usually of an earlier epoch."""
    ALL = 3
    """A finished response to another prompt."""


ALL_SCOPES = frozenset(Scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Drafts of a step, one row per slot. Rows are padded with zeros beyond `lengths`."""

    lengths: Int32Array
    """[rows]"""
    tokens: Int32Array
    """[rows, max_draft_tokens], like all arrays below"""
    scope: NDArray[np.uint8]
    match_length: NDArray[np.int16]
    """Length of the common suffix of the request's tokens and the matched context."""
    num_agreeing: NDArray[np.int16]
    """Number of matches, of `total`, that are continued by this token."""
    total: NDArray[np.int16]
    probability: NDArray[np.float32]
    """Predicted acceptance probability, given that all tokens before it are accepted."""

    def rows(self, numbers: NDArray[np.int64]) -> "DraftBatch":
        """Copy with only the drafts of the given rows."""
        return DraftBatch(**{each.name: getattr(self, each.name)[numbers] for each in fields(self)})

    @classmethod
    def empty(cls, rows: int, max_draft_tokens: int) -> Self:
        return cls(
            lengths=np.zeros(rows, np.int32),
            tokens=np.zeros((rows, max_draft_tokens), np.int32),
            scope=np.zeros((rows, max_draft_tokens), np.uint8),
            match_length=np.zeros((rows, max_draft_tokens), np.int16),
            num_agreeing=np.zeros((rows, max_draft_tokens), np.int16),
            total=np.zeros((rows, max_draft_tokens), np.int16),
            probability=np.zeros((rows, max_draft_tokens), np.float32),
        )


class Store(Protocol):
    """Index of generated texts that proposes draft tokens. Not thread-safe."""

    def begin(self, group: bytes, prompt: Int32Array) -> int:
        """Register a request and return its slot.

        Requests with the same `group` and prompt are siblings. Requests with the same prompt share
        its finished responses.
        """

    def end(self, slot: int, *, keep: bool) -> None:
        """End a request. With `keep` its response is stored as finished, otherwise deleted."""

    def age(self) -> None:
        """Mark a weights update: all stored texts become older by one weights version."""

    def step(
        self, slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
    ) -> DraftBatch:
        """Append new tokens to the requests of all rows, then draft for each row.

        Row i gets the next `counts[i]` of the tokens, and a draft of at most `limits[i]` tokens.
        """

    def reliability(self) -> Reliability:
        """Predicted and actual acceptance of all drafts so far."""

    @property
    def num_bytes(self) -> int:
        """Upper bound of the memory that the store uses, in bytes."""

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens of prompts and responses, running and finished."""


def hash_key(name: bytes) -> int:
    """64-bit key of a group name or prompt. Collisions are assumed not to happen."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def check_begin(prompt: Int32Array) -> None:
    _check_array("prompt", prompt)
    if not 0 < len(prompt) < MAX_TEXT_TOKENS:
        raise InvalidCall(f"prompt of {len(prompt)} tokens; must have 1 to {MAX_TEXT_TOKENS - 1}")
    _check_tokens(prompt)


def check_step(
    slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
) -> None:
    """Check the arguments of `Store.step`, except whether slots exist, which the store checks."""
    for name, array in (
        ("slots", slots),
        ("counts", counts),
        ("tokens", tokens),
        ("limits", limits),
    ):
        _check_array(name, array)
    if not len(slots) == len(counts) == len(limits):
        raise InvalidCall(
            f"{len(slots)} slots, {len(counts)} counts, {len(limits)} limits; must be one per row"
        )
    if len(slots) and min(int(counts.min()), int(limits.min())) < 0:
        raise InvalidCall("negative count or limit")
    if int(counts.sum(dtype=np.int64)) != len(tokens):
        raise InvalidCall(f"{len(tokens)} tokens, but counts of {int(counts.sum())} in total")
    _check_tokens(tokens)


def _check_array(name: str, array: Int32Array) -> None:
    if array.dtype != np.int32 or array.ndim != 1:
        raise InvalidCall(f"{name} must be a 1-D int32 array, not {array.ndim}-D {array.dtype}")


def _check_tokens(tokens: Int32Array) -> None:
    if len(tokens) and int(tokens.min()) < 0:
        raise InvalidCall(f"negative token id {int(tokens.min())}")
