"""Whose row is whose: the draft store's slot of every request that the runner knows.

Rows move whenever a request joins or leaves, so a row is looked up by its request's id at every
step. A request that was preempted is not in the batch and keeps its slot: what it has said stands.
One that the runner has forgotten has ended, or was aborted; either way the model did say it, and it
is kept as history.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.protocol import SpeculationSkipReason
from kernels.draft_index.errors import InvalidCall
from kernels.draft_index.interface import Store

GROUP_ARG = "coppice_group"
NO_DRAFTS_ARG = "coppice_no_drafts"


@dataclass(slots=True, kw_only=True)
class TrackedRequest:
    """A live request. `num_stored` of its tokens are in the store; it has at most `num_tokens`.

    `skip_reason` says why it gets no drafts. `seeded`: its random stream is promised to be its own,
    and how much is drawn from it would depend on the drafts. `no_room`: the store refuses it.
    """

    slot: int | None
    num_stored: int
    num_tokens: int
    skip_reason: SpeculationSkipReason | None

    def limit(self, max_draft_tokens: int, num_tokens: int) -> int:
        """A step brings one token more than it accepts; none is wanted beyond the last."""
        if self.skip_reason is not None:
            return 0
        return max(0, min(max_draft_tokens, self.num_tokens - num_tokens - 1))


class RequestTable:
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
        """`request` as the runner keeps it; it is seen here first with a token sampled."""
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
            skip_reason="no_room" if slot is None else find_skip_reason(extra_args, sampling),
        )

    def end(self, ended: Iterable[str], requests: Mapping[str, Any]) -> None:
        """Whom the runner is about to forget. Those never seen here have said something too."""
        for request_id in ended:
            request = requests.get(request_id)
            if request is None or not request.output_token_ids:
                continue
            row = self.row(request_id, requests)
            if row.slot is not None:
                self._append_remaining(row.slot, row.num_stored, request)
                self._store.end(row.slot, keep=True)
            del self._rows[request_id]

    def _append_remaining(self, slot: int, num_stored: int, request: Any) -> None:
        new_tokens = request.output_token_ids[num_stored - len(request.prompt_token_ids) :]
        if new_tokens:
            slots, counts, tokens = (
                np.array(a, np.int32) for a in ([slot], [len(new_tokens)], new_tokens)
            )
            self._store.step(slots, counts, tokens, np.zeros(1, np.int32))

    def finish_missing(self, requests: Container[str], *, keep: bool = True) -> None:
        """Whom the runner has forgotten. `keep`: what they have said is worth drafting from."""
        for request_id in [known for known in self._rows if known not in requests]:
            slot = self._rows.pop(request_id).slot
            if slot is not None:
                self._store.end(slot, keep=keep)


def find_skip_reason(extra_args: Mapping[str, Any], sampling: Any) -> SpeculationSkipReason | None:
    if extra_args.get(NO_DRAFTS_ARG):
        return "refused"
    return "seeded" if sampling.seed is not None else None
