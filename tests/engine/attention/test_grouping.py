"""Each step is grouped, or counted with the reason for not grouping it."""

from dataclasses import replace
from typing import Any

import numpy as np

from engine.attention.counters import Counters, Snapshot, aggregate_ranks
from engine.attention.crossover import Crossover
from engine.attention.grouping import StepGrouper
from engine.types.feature_stats import SharedPrefixStats
from tests.engine.attention.block_tables import BLOCK, table_of

NEVER = Crossover(stock=(0, 0, 0), shared=(1, 0, 0, 0, 0, 0))
ALWAYS = Crossover(stock=(1, 0, 0), shared=(0, 0, 0, 0, 0, 0))
TABLE = table_of([[1, 2, 3], [1, 2, 4], [5, 6, 7], [8, 9]])
LENS = np.array([70, 80, 90, 33], dtype=np.int32)
BYTES = 100


def grouper(counts: Counters, **options: Any) -> StepGrouper:
    defaults: dict[str, Any] = {
        "mode": "always",
        "block_size": BLOCK,
        "bytes_per_token": BYTES,
        "max_query_tokens": 16,
    }
    return StepGrouper(counts=counts, **(defaults | options))


def starts(*query_lens: int) -> Any:
    return np.cumsum([0, *query_lens], dtype=np.int32)


def skipped(**options: Any) -> list[str]:
    counts = Counters()
    query_lens = options.pop("query_lens", (1, 1, 1, 1))
    table = options.pop("table", TABLE)
    assert grouper(counts, **options).group_rows(table, LENS, starts(*query_lens)) is None
    return list(counts.steps_skipped.elements())


def test_sharing_rows_are_counted_with_the_kv_reads_saved() -> None:
    counts = Counters()
    grouping = grouper(counts).group_rows(TABLE, LENS, starts(1, 5, 1, 1))
    assert grouping is not None
    assert (grouping.num_rows, grouping.num_tokens) == (4, 8)
    assert grouping.plan.suffix_starts.tolist() == [64, 64, 0, 0]
    assert counts.read() == Snapshot(
        steps_grouped=1, rows_grouped=2, prefix_bytes_not_read=64 * BYTES, steps_skipped={}
    )


def test_prefill_rows_are_left_to_stock_attention() -> None:
    grouping = grouper(Counters()).group_rows(TABLE, LENS, starts(1, 1, 17, 1))
    assert grouping is not None
    assert (grouping.num_rows, grouping.num_tokens) == (2, 2)


def test_step_that_is_not_grouped_has_a_reason() -> None:
    assert skipped(query_lens=(17, 1, 1, 1)) == ["query_length"]
    assert skipped(table=table_of([[1], [2], [3], [4]])) == ["nothing_shared"]
    assert skipped(mode="auto", crossover=NEVER) == ["not_worth_it"]
    assert skipped(unsupported="sinks") == ["sinks"]


def test_step_is_grouped_while_all_of_its_rows_fit_into_the_window() -> None:
    """The longest row has 90 tokens. Rows that prefill are not grouped, so they do not count."""
    assert skipped(window=89) == ["sliding_window"]
    grouping = grouper(Counters(), window=90).group_rows(TABLE, LENS, starts(1, 1, 1, 1))
    assert grouping is not None and grouping.max_len == 90
    grouping = grouper(Counters(), window=80).group_rows(TABLE, LENS, starts(1, 1, 17, 1))
    assert grouping is not None and (grouping.num_rows, grouping.max_len) == (2, 80)


def test_mode_decides_whether_the_crossover_applies() -> None:
    for mode, crossover, record_grouped in (
        ("auto", ALWAYS, 1),
        ("auto", NEVER, 0),
        ("auto", None, 0),
        ("always", NEVER, 1),
        ("off", ALWAYS, 0),
    ):
        counts = Counters()
        grouper(counts, mode=mode, crossover=crossover).group_rows(TABLE, LENS, starts(1, 1, 1, 1))
        assert counts.steps_grouped == record_grouped


def test_rows_with_drafts_cost_as_much_as_others_on_a_gpu() -> None:
    """There the KV of a row is read once for all of its query tokens."""
    launches = replace(ALWAYS, stock=(0.0, 1.0, 0.0), launch_seconds=len(LENS) + 1)
    for counts_rows, shares in ((False, True), (True, False)):
        found = grouper(Counters(), mode="auto", crossover=launches, counts_rows=counts_rows)
        assert (found.group_rows(TABLE, LENS, starts(2, 2, 2, 2)) is not None) == shares


def test_ranks_take_the_same_steps_and_divide_the_bytes() -> None:
    counts = Counters()
    counts.record_grouped(num_rows=3, bytes_saved=500)
    counts.record_skipped("nothing_shared")
    total = aggregate_ranks([counts.read(), counts.read()])
    assert isinstance(total, SharedPrefixStats)
    assert (total.steps_grouped, total.rows_grouped) == (1, 3)
    assert total.prefix_bytes_not_read == 1000
    assert total.steps_skipped["nothing_shared"] == 1
    assert total.steps_skipped["failed"] == 0
