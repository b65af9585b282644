"""Table of requests and their slots in the draft store, and the rows of one step's batch.

Batch rows move whenever a request is added or removed, so a row is looked up by request id in every
step. A preempted request is not in the batch but keeps its slot and tokens. A request that the
runner has dropped has finished or was aborted; in both cases the model generated its tokens, and
they are kept as history.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.types.feature_stats import SpeculationSkipReason
from kernels.draft_index.store_protocol import DraftBatch, Int32Array, InvalidCall, Store

GROUP_ARG = "coppice_group"
NO_DRAFTS_ARG = "coppice_no_drafts"


@dataclass(slots=True, kw_only=True)
class TrackedRequest:
    """Unfinished request with its slot in the draft store.

    `num_stored` of its at most `num_tokens` tokens are in the store. `skip_reason` is the reason it
    gets no drafts. `seeded`: the sample must depend only on its own random stream, and the number
    of draws from it would depend on the drafts. `store_full`: the store has no slot for it.
    `stop_token_ids` end the sample.
    """

    slot: int | None
    num_stored: int
    num_tokens: int
    skip_reason: SpeculationSkipReason | None
    stop_token_ids: frozenset[int] = frozenset()

    def end_at_stop(self, new_tokens: Sequence[int], num_tokens: int) -> None:
        """End the sample at the first stop token of a step; it has `num_tokens` after the step.

        A step may accept draft tokens after a stop token. vLLM's scheduler drops them later.
        """
        if self.stop_token_ids.isdisjoint(new_tokens):
            return
        stop = next(i for i, token in enumerate(new_tokens) if token in self.stop_token_ids)
        self.num_tokens = min(self.num_tokens, num_tokens - len(new_tokens) + stop + 1)


class RequestTable:
    """Draft-store slots of the requests in vLLM's model runner, by request id."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, TrackedRequest] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, request_id: str, requests: Mapping[str, Any]) -> TrackedRequest:
        known = self._rows.get(request_id)
        if known is None:
            known = self._rows[request_id] = self._start_request(request_id, requests[request_id])
        return known

    def _start_request(self, request_id: str, request: Any) -> TrackedRequest:
        """Begin a draft-store slot for a request; `request` is the model runner's state of it.

        A request is first seen here with a sampled token.
        """
        sampling = request.sampling_params
        extra_args = sampling.extra_args or {}
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        try:
            slot = self._store.begin(str(extra_args.get(GROUP_ARG, request_id)).encode(), prompt)
        except InvalidCall:
            slot = None
        return TrackedRequest(
            slot=slot,
            num_stored=len(prompt),
            num_tokens=len(prompt) + sampling.max_tokens,
            skip_reason="store_full" if slot is None else find_skip_reason(extra_args, sampling),
            stop_token_ids=frozenset((sampling.eos_token_id, *(sampling.stop_token_ids or ()))),
        )

    def end(self, ended: Iterable[str], requests: Mapping[str, Any]) -> None:
        """End the slots of requests that the model runner is about to drop, and store their tokens.

        This includes requests that have had no slot so far.
        """
        for request_id in ended:
            request = requests.get(request_id)
            if request is None or not request.output_token_ids:
                continue
            row = self.row(request_id, requests)
            if row.slot is not None:
                self._append_remaining(row.slot, row, request)
                self._store.end(row.slot, keep=True)
            del self._rows[request_id]

    def _append_remaining(self, slot: int, row: TrackedRequest, request: Any) -> None:
        start = row.num_stored - len(request.prompt_token_ids)
        remaining = request.output_token_ids[start:]
        row.end_at_stop(remaining, row.num_stored + len(remaining))
        if new_tokens := remaining[: row.num_tokens - row.num_stored]:
            slots, counts, tokens = (
                np.array(a, np.int32) for a in ([slot], [len(new_tokens)], new_tokens)
            )
            self._store.step(slots, counts, tokens, np.zeros(1, np.int32))

    def finish_missing(self, requests: Container[str], *, keep: bool = True) -> None:
        """End the slots of requests that the runner has dropped; `keep` retains their tokens."""
        for request_id in [known for known in self._rows if known not in requests]:
            slot = self._rows.pop(request_id).slot
            if slot is not None:
                self._store.end(slot, keep=keep)


def find_skip_reason(extra_args: Mapping[str, Any], sampling: Any) -> SpeculationSkipReason | None:
    if extra_args.get(NO_DRAFTS_ARG):
        return "disabled"
    if sampling.seed is not None:
        return "seeded"
    controls = (sampling.min_p, sampling.logit_bias, sampling.min_tokens)
    return "sampling" if any(controls) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of a step that have slots in the draft store, with their indices in the runner's batch.

    `lengths` are total sequence lengths, `max_lengths` the largest that a draft may reach.
    """

    batch_indices: list[int]
    rows: list[TrackedRequest]
    slots: Int32Array
    max_lengths: Int32Array
    lengths: Int32Array

    @classmethod
    def of(cls, rows: Mapping[int, TrackedRequest], lengths: Int32Array) -> "Batch":
        """Batch of rows by their index in the runner's batch; `lengths` are those of all rows.

        Tokens after the end of a sample do not count.
        """
        tracked = {index: row for index, row in rows.items() if row.slot is not None}
        indices, known = list(tracked), list(tracked.values())
        num_tokens = np.array([row.num_tokens for row in known], np.int32)
        ends = [0 if row.skip_reason is not None else row.num_tokens - 1 for row in known]
        return cls(
            batch_indices=indices,
            rows=known,
            slots=np.array([row.slot for row in known], np.int32),
            max_lengths=np.array(ends, np.int32),
            lengths=np.minimum(np.asarray(lengths, np.int32)[indices], num_tokens),
        )

    def limits(self, max_draft_tokens: int) -> Int32Array:
        """Maximum length of each row's draft, less than the number of tokens it may still generate.

        A step yields one token more than it accepts.
        """
        limits: Int32Array = np.clip(self.max_lengths - self.lengths, 0, max_draft_tokens)
        return limits

    def store(self) -> tuple[Int32Array, Int32Array]:
        """Mark all tokens as stored; returns the first position and the number of new tokens.

        A row that vLLM has shortened has no new tokens.
        """
        starts = np.array([row.num_stored for row in self.rows], np.int32)
        for row, length in zip(self.rows, self.lengths.tolist(), strict=True):
            row.num_stored = length
        return starts, np.maximum(self.lengths - starts, 0)

    def draft_indices(self, ids: Sequence[str]) -> dict[str, int]:
        return {ids[row]: number for number, row in enumerate(self.batch_indices)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Number of tokens that a step generated for each row, and the last of them."""

    counts: NDArray[np.int64]
    last: NDArray[np.int64]
    """Arbitrary in a row without new tokens."""

    @classmethod
    def of(cls, sampled: Sequence[Sequence[int]]) -> "NewTokens":
        return cls(
            counts=np.array([len(new) for new in sampled], np.int64),
            last=np.array([new[-1] if new else 0 for new in sampled], np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SentDrafts:
    """Drafts of the step in progress, and how many tokens of each were sent to verification."""

    draft_indices: dict[str, int]
    lengths: Int32Array
    drafted: DraftBatch | None
    """None while a profile is measured, where the draft tokens do not matter."""

    def to(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Index of each request's draft, -1 for requests without a draft."""
        return np.array([self.draft_indices.get(request_id, -1) for request_id in ids], np.int64)
