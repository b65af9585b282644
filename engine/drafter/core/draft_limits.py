"""Who is drafted for, and how far.

No drafts get a sample with a seed, one that refuses them, and none goes beyond a sample's end.
"""

from collections.abc import Callable
from typing import Any

from engine.protocol import SpeculationSkip
from engine.speculation.request_slots import skip_of


class Wanted:
    """`requests`: the scheduler's, by their ids. `skipped` is told once of whoever gets none."""

    def __init__(
        self, requests: dict[str, Any], longest: int, skipped: Callable[[SpeculationSkip], None]
    ) -> None:
        self._requests = requests
        self._longest = longest
        self._skipped = skipped
        self._skips: dict[str, SpeculationSkip | None] = {}

    def limit(self, request: Any) -> int:
        """A step brings one token more than it accepts; none is wanted beyond the last."""
        if self._skip(request) is not None:
            return 0
        left = int(request.max_tokens - request.num_output_tokens) - 1
        return max(0, min(self._longest, left))

    def _skip(self, request: Any) -> SpeculationSkip | None:
        if request.request_id not in self._skips:
            self._forget_ended()
            sampling = request.sampling_params
            skip = self._skips[request.request_id] = skip_of(sampling.extra_args or {}, sampling)
            if skip is not None:
                self._skipped(skip)
        return self._skips[request.request_id]

    def _forget_ended(self) -> None:
        if len(self._skips) > 2 * len(self._requests) + 64:
            self._skips = {
                name: skip for name, skip in self._skips.items() if name in self._requests
            }
