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

from engine.protocol import SpeculationSkip
from kernels.draft_index.errors import WrongCall
from kernels.draft_index.interface import Store

GROUP = "coppice_group"
NO_DRAFTS = "coppice_no_drafts"


@dataclass(slots=True, kw_only=True)
class Row:
    """A live request. `num_seen` of its tokens are in the store; it has at most `num_tokens`.

    `skip` says why it gets no drafts. `seeded`: its random stream is promised to be its own, and
    how much is drawn from it would depend on the drafts. `no_room`: the store refuses it.
    """

    slot: int | None
    num_seen: int
    num_tokens: int
    skip: SpeculationSkip | None

    def limit(self, longest: int, num_tokens: int) -> int:
        """A step brings one token more than it accepts; none is wanted beyond the last."""
        if self.skip is not None:
            return 0
        return max(0, min(longest, self.num_tokens - num_tokens - 1))


class Rows:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, request_id: str, requests: Mapping[str, Any]) -> Row:
        known = self._rows.get(request_id)
        if known is None:
            known = self._rows[request_id] = self._begin(request_id, requests[request_id])
        return known

    def _begin(self, request_id: str, request: Any) -> Row:
        """`request` as the runner keeps it; it is seen here first with a token sampled."""
        sampling = request.sampling_params
        named = sampling.extra_args or {}
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        try:
            slot = self._store.begin(str(named.get(GROUP, request_id)).encode(), prompt)
        except WrongCall:
            slot = None
        return Row(
            slot=slot,
            num_seen=len(prompt),
            num_tokens=len(prompt) + sampling.max_tokens,
            skip="no_room" if slot is None else skip_of(named, sampling),
        )

    def end(self, ended: Iterable[str], requests: Mapping[str, Any]) -> None:
        """Whom the runner is about to forget. Those never seen here have said something too."""
        for request_id in ended:
            request = requests.get(request_id)
            if request is None or not request.output_token_ids:
                continue
            row = self.row(request_id, requests)
            if row.slot is not None:
                self._catch_up(row.slot, row.num_seen, request)
                self._store.end(row.slot, keep=True)
            del self._rows[request_id]

    def _catch_up(self, slot: int, num_seen: int, request: Any) -> None:
        said = request.output_token_ids[num_seen - len(request.prompt_token_ids) :]
        if said:
            slots, counts, tokens = (np.array(a, np.int32) for a in ([slot], [len(said)], said))
            self._store.step(slots, counts, tokens, np.zeros(1, np.int32))

    def end_those_not_in(self, requests: Container[str], *, keep: bool = True) -> None:
        """Whom the runner has forgotten. `keep`: what they have said is worth drafting from."""
        for request_id in [known for known in self._rows if known not in requests]:
            slot = self._rows.pop(request_id).slot
            if slot is not None:
                self._store.end(slot, keep=keep)


def skip_of(named: Mapping[str, Any], sampling: Any) -> SpeculationSkip | None:
    if named.get(NO_DRAFTS):
        return "refused"
    return "seeded" if sampling.seed is not None else None
