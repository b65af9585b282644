import pytest

from coppice import (
    BadAnswer,
    EndRecord,
    KvRecord,
    ProgressRecord,
    Record,
    RolloutLost,
    StartRecord,
    TokensRecord,
    VersionSpan,
)
from coppice.operations.record_stream import RecordDeduplicator
from tests.client.answers import RECORDS, USAGE

START, SAMPLE, GROUP, _, *REST = RECORDS
PROGRESS = ProgressRecord(num_samples=3, num_samples_done=1)


def new_of(deduplicator: RecordDeduplicator, records: list[Record]) -> list[Record]:
    """The new records of one connection."""
    deduplicator.on_reconnect()
    return [record for record in records if deduplicator.is_new(record)]


def test_replay_yields_no_duplicates() -> None:
    deduplicator = RecordDeduplicator()
    assert new_of(deduplicator, [START, SAMPLE]) == [START, SAMPLE]
    assert new_of(deduplicator, [START]) == []
    assert new_of(deduplicator, [START, SAMPLE, GROUP, *REST]) == [GROUP, *REST]
    assert deduplicator.ended


def test_kv_records_of_groups_and_segments_are_yielded_once() -> None:
    told: list[Record] = [
        KvRecord(group=0, segment=segment, kv_reason="arena_full")
        for segment in (None, "0.0", "0.1")
    ]
    deduplicator = RecordDeduplicator()
    assert new_of(deduplicator, [START, *told[:2]]) == [START, *told[:2]]
    assert new_of(deduplicator, [START, *told]) == told[2:]


def test_replay_may_have_another_order() -> None:
    deduplicator = RecordDeduplicator()
    new_of(deduplicator, [START, SAMPLE, GROUP])
    assert new_of(deduplicator, [START, *REST[:1], GROUP, SAMPLE, *REST]) == REST


def tokens(start: int, *token_ids: int) -> TokensRecord:
    """Tokens of which those from index 3 on have another version."""
    end = start + len(token_ids)
    spans = [
        VersionSpan(version=version, start=max(a, start) - start, end=min(b, end) - start)
        for version, a, b in (("v0", 0, 3), ("v1", 3, 100))
        if a < end and b > start
    ]
    logprobs = [-0.5 * token for token in token_ids]
    return TokensRecord(
        group=0, index=1, start=start, token_ids=[*token_ids], logprobs=logprobs, versions=spans
    )


def test_replayed_tokens_are_cut_to_the_new_ones() -> None:
    deduplicator = RecordDeduplicator()

    def new_parts(*records: Record) -> list[Record | None]:
        deduplicator.on_reconnect()
        return [deduplicator.new_part(record) for record in (START, *records)]

    assert new_parts(tokens(0, 5, 6)) == [START, tokens(0, 5, 6)]
    assert new_parts(tokens(0, 5, 6, 7, 8)) == [None, tokens(2, 7, 8)]
    assert new_parts(tokens(0, 5), tokens(1, 6, 7, 8)) == [None, None, None]
    assert new_parts(tokens(4, 9), SAMPLE) == [None, tokens(4, 9), SAMPLE]


def test_progress_counts_after_the_replay_has_caught_up() -> None:
    deduplicator = RecordDeduplicator()
    assert new_of(deduplicator, [START, PROGRESS, SAMPLE]) == [START, PROGRESS, SAMPLE]
    assert new_of(deduplicator, [START, PROGRESS, SAMPLE, PROGRESS]) == [PROGRESS]


def test_another_rollout_is_not_a_replay() -> None:
    deduplicator = RecordDeduplicator()
    new_of(deduplicator, [START, SAMPLE])
    with pytest.raises(RolloutLost, match="no longer has rollout r1 and started r2"):
        new_of(deduplicator, [StartRecord(id="r2")])
    assert deduplicator.rollout_id == "r2"


def test_replay_without_delivered_records_is_refused() -> None:
    deduplicator = RecordDeduplicator()
    new_of(deduplicator, [START, SAMPLE, GROUP])
    with pytest.raises(RolloutLost, match="without some of its records"):
        new_of(deduplicator, [START, GROUP, EndRecord(outcome="done", usage=USAGE)])
    assert not deduplicator.ended


def test_replay_begins_with_the_start_record() -> None:
    deduplicator = RecordDeduplicator()
    new_of(deduplicator, [START])
    with pytest.raises(BadAnswer, match="start record"):
        new_of(deduplicator, [SAMPLE])
