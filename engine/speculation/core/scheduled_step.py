"""Data types of a scheduled engine step and the drafts looked up for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.speculation.draft_message import LateDrafts
from kernels.draft_index.store_protocol import DraftBatch

NO_TOKEN: Final = -1
"""Sampled token of a row whose draft was dropped; it differs from every draft token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Drafts that were looked up for one step.

    `late` continue the tokens on the host. `expected` is what remains of them after the step in
    progress if they are right: row i continues after `num_new[i]` more tokens.
    """

    late: LateDrafts
    expected: DraftBatch
    num_new: NDArray[np.int64]

    def continuation(self, request: Any) -> tuple[list[int], int]:
        """Continuation of a request's tokens in its draft, and their number since the lookup.

        The draft is empty if those tokens differ from it.
        """
        row = self.late.rows.get(request.request_id)
        if row is None:
            return [], 0
        new = request.all_token_ids[int(self.late.num_tokens[row]) :]
        draft = self.late.tokens[row, : self.late.lengths[row]].tolist()
        return (draft[len(new) :] if draft[: len(new)] == new else []), len(new)

    def outcome(self, request: Any, sampled: list[int], verified: int) -> list[int]:
        """Tokens sampled after the expected draft; none if it cannot be compared with them.

        `request` has the tokens before them. It is None if it was aborted.
        """
        if request is None or not sampled:
            return []
        draft, num_new = self.continuation(request)
        if not draft:
            return [NO_TOKEN]
        is_expected = num_new == self.num_new[self.late.rows[request.request_id]]
        return sampled[: verified + 1] if is_expected else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """Step that is scheduled and whose tokens have not arrived yet.

    `output` is vLLM's SchedulerOutput, `requests` are its requests by id. `is_timeable`: all rows
    decode.
    """

    output: Any
    requests: dict[str, Any]
    began: float
    context: int
    is_timeable: bool
    lookup: Lookup | None

    def num_drafts(self, request_id: str) -> int:
        """Number of a row's tokens that are verified as drafts."""
        return len(self.output.scheduled_spec_decode_tokens.get(request_id, ()))

    def num_expected(self, request: Any, draft: Sequence[int]) -> int:
        """Number of tokens that this step generates for a request if a new draft is right.

        It accepts the draft that it verifies as far as the new one agrees, and samples one more.
        """
        if request.request_id not in self.requests:
            return 0
        verified: list[int] = []
        if self.lookup is not None:
            verified, _ = self.lookup.continuation(request)
            verified = verified[: self.num_drafts(request.request_id)]
        pairs = zip(verified, draft, strict=False)
        differs = (number for number, (old, new) in enumerate(pairs) if old != new)
        return 1 + next(differs, min(len(verified), len(draft)))


def sampled_tokens(model_runner_output: Any) -> dict[str, list[int]]:
    """Tokens of vLLM's ModelRunnerOutput by request, before the scheduler cuts them at a stop."""
    tokens = model_runner_output.sampled_token_ids
    if not tokens:
        return {}
    return {name: tokens[row] for name, row in model_runner_output.req_id_to_index.items()}


def decodes(request: Any) -> bool:
    """Return whether the step in progress, or an earlier one, completed the request's prefill."""
    return not request.is_prefill_chunk and bool(
        request.num_output_tokens or request.num_output_placeholders
    )
