"""Per-request limits on drafts.

Samples with a seed and samples that opt out get no drafts, and no draft extends past a sample's
end.
"""

from collections.abc import Callable
from typing import Any

from engine.speculation.request_table import find_skip_reason
from engine.stats import SpeculationSkipReason


class DraftLimits:
    """Draft limits of the scheduler's `requests`, by request id.

    `skipped` is called once for each request that gets no drafts.
    """

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
        """Maximum draft length of a request: a step yields one token more than it accepts."""
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
