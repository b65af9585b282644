import pytest

from coppice import (
    BadAnswer,
    EndRecord,
    KvRecord,
    ProgressRecord,
    Record,
    RolloutLost,
    StartRecord,
)
from coppice.transport.deduplicator import RecordDeduplicator
from tests.client.answers import RECORDS, USAGE

START, SAMPLE, GROUP, _, *REST = RECORDS
PROGRESS = ProgressRecord(samples=3, samples_done=1)


def new_of(deduplicator: RecordDeduplicator, records: list[Record]) -> list[Record]:
    """One connection's records that are new."""
    deduplicator.on_reconnect()
    return [record for record in records if deduplicator.is_new(record)]


def test_a_replay_repeats_nothing() -> None:
    deduplicator = RecordDeduplicator()
    assert new_of(deduplicator, [START, SAMPLE]) == [START, SAMPLE]
    assert new_of(deduplicator, [START]) == []
    assert new_of(deduplicator, [START, SAMPLE, GROUP, *REST]) == [GROUP, *REST]
    assert deduplicator.ended


def test_a_groups_prompt_kv_and_that_of_each_segment_come_once() -> None:
    told: list[Record] = [
        KvRecord(group=0, segment=segment, kv_reason="arena_full")
        for segment in (None, "0.0", "0.1")
    ]
    deduplicator = RecordDeduplicator()
    assert new_of(deduplicator, [START, *told[:2]]) == [START, *told[:2]]
    assert new_of(deduplicator, [START, *told]) == told[2:]


def test_the_order_of_a_replay_may_be_another() -> None:
    deduplicator = RecordDeduplicator()
    new_of(deduplicator, [START, SAMPLE, GROUP])
    assert new_of(deduplicator, [START, *REST[:1], GROUP, SAMPLE, *REST]) == REST


def test_progress_counts_once_the_replay_has_caught_up() -> None:
    deduplicator = RecordDeduplicator()
    assert new_of(deduplicator, [START, PROGRESS, SAMPLE]) == [START, PROGRESS, SAMPLE]
    assert new_of(deduplicator, [START, PROGRESS, SAMPLE, PROGRESS]) == [PROGRESS]


def test_another_rollout_is_no_replay() -> None:
    deduplicator = RecordDeduplicator()
    new_of(deduplicator, [START, SAMPLE])
    with pytest.raises(RolloutLost, match="r1 is forgotten; r2 began"):
        new_of(deduplicator, [StartRecord(id="r2")])
    assert deduplicator.rollout_id == "r2"


def test_a_replay_without_what_was_delivered_is_none() -> None:
    deduplicator = RecordDeduplicator()
    new_of(deduplicator, [START, SAMPLE, GROUP])
    with pytest.raises(RolloutLost, match="without all of its records"):
        new_of(deduplicator, [START, GROUP, EndRecord(outcome="done", usage=USAGE)])
    assert not deduplicator.ended


def test_a_replay_begins_with_the_rollouts_name() -> None:
    deduplicator = RecordDeduplicator()
    new_of(deduplicator, [START])
    with pytest.raises(BadAnswer, match="first record"):
        new_of(deduplicator, [SAMPLE])
