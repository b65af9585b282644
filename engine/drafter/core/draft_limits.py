"""Who is drafted for, and how far.

No drafts get a sample with a seed, one that refuses them, and none goes beyond a sample's end.
"""

from collections.abc import Callable
from typing import Any

from engine.protocol import SpeculationSkipReason
from engine.speculation.request_slots import find_skip_reason


class DraftLimits:
    """`requests`: the scheduler's, by their ids. `skipped` is told once of whoever gets none."""

    def __init__(
        self,
        requests: dict[str, Any],
        max_draft_tokens: int,
        skipped: Callable[[SpeculationSkipReason], None],
    ) -> None:
        self._requests = requests
        self._max_draft_tokens = max_draft_tokens
        self._on_skip = skipped
        self._skip_reasons: dict[str, SpeculationSkipReason | None] = {}

    def limit(self, request: Any) -> int:
        """A step brings one token more than it accepts; none is wanted beyond the last."""
        if self._skip_reason(request) is not None:
            return 0
        left = int(request.max_tokens - request.num_output_tokens) - 1
        return max(0, min(self._max_draft_tokens, left))

    def _skip_reason(self, request: Any) -> SpeculationSkipReason | None:
        if request.request_id not in self._skip_reasons:
            self._remove_finished()
            sampling = request.sampling_params
            skip = self._skip_reasons[request.request_id] = find_skip_reason(
                sampling.extra_args or {}, sampling
            )
            if skip is not None:
                self._on_skip(skip)
        return self._skip_reasons[request.request_id]

    def _remove_finished(self) -> None:
        if len(self._skip_reasons) > 2 * len(self._requests) + 64:
            self._skip_reasons = {
                name: skip for name, skip in self._skip_reasons.items() if name in self._requests
            }
