"""Per-process counters of shared-prefix attention steps, exported as metrics."""

from collections import Counter
from collections.abc import Iterable
from typing import TypedDict, get_args

from engine.types.feature_stats import AttentionFallbackReason, SharedPrefixStats


class Snapshot(TypedDict):
    """Shared-prefix attention counters of one worker process, as sent to the service."""

    steps_grouped: int
    rows_grouped: int
    prefix_bytes_not_read: int
    steps_skipped: dict[AttentionFallbackReason, int]


class Counters:
    """Shared-prefix attention counters, written by the thread that runs the engine steps.

    They are read between two steps. A step counts once per group of layers that share a block
    table: once, for most models.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counts, after the warm-up steps."""
        self.steps_grouped = 0
        self.rows_grouped = 0
        self.prefix_bytes_not_read = 0
        self.steps_skipped: Counter[AttentionFallbackReason] = Counter()

    def record_grouped(self, *, num_rows: int, bytes_saved: int) -> None:
        self.steps_grouped += 1
        self.rows_grouped += num_rows
        self.prefix_bytes_not_read += bytes_saved

    def record_skipped(self, reason: AttentionFallbackReason) -> None:
        self.steps_skipped[reason] += 1

    def read(self) -> Snapshot:
        return Snapshot(
            steps_grouped=self.steps_grouped,
            rows_grouped=self.rows_grouped,
            prefix_bytes_not_read=self.prefix_bytes_not_read,
            steps_skipped=dict(self.steps_skipped),
        )


COUNTERS = Counters()


def aggregate_ranks(ranks: Iterable[Snapshot]) -> SharedPrefixStats:
    """Statistics of shared-prefix attention over all ranks of an engine.

    All ranks run the same steps and rows, and each saves its own share of the bytes.
    """
    counted = list(ranks)
    first = counted[0]
    return SharedPrefixStats(
        steps_grouped=first["steps_grouped"],
        rows_grouped=first["rows_grouped"],
        prefix_bytes_not_read=sum(rank["prefix_bytes_not_read"] for rank in counted),
        steps_skipped={
            reason: first["steps_skipped"].get(reason, 0)
            for reason in get_args(AttentionFallbackReason)
        },
    )
