"""A soak of drains fails if it has exercised too little; long drains have logged reasons."""

import json

from tests.soak.drain_checks import messages, not_exercised, num_moved, slow_drain

KINDS = ("streamed", "held_handle")
ANSWERED = {"answered (streamed)": 10, "answered (held_handle)": 10}
MOVED = {"rollouts": 1, "sessions": 1}


def test_soak_of_all_kinds_passes() -> None:
    assert not_exercised(ANSWERED, KINDS, MOVED, 10) == []


def test_soak_whose_handles_were_all_refused_fails() -> None:
    refused = {"answered (streamed)": 10, "no handle: arena_full (held_handle)": 10}
    assert not_exercised(refused, KINDS, MOVED, 10) == ["held_handle: 0 answered"]


def test_soak_without_moved_sessions_fails() -> None:
    moved = {**MOVED, "sessions": 0}
    assert not_exercised(ANSWERED, KINDS, moved, 10) == ["sessions: 0 moved"]


def test_accepted_offers_are_counted_in_the_log() -> None:
    log = [
        "rollouts a.b moved to http://c",
        "rollouts a.d stay here",
        "sessions a.e moved to http://c",
    ]
    lines = [json.dumps({"message": message}) for message in log]
    assert num_moved(messages([*lines, "Traceback", "", lines[0][:9]])) == {
        "rollouts": 1,
        "sessions": 1,
    }


def test_long_drain_has_the_last_reason_of_its_log() -> None:
    log = [
        f"draining for {n}0 s, for at most 9 s more; left: results to fetch: {n}" for n in (2, 1)
    ]
    found = slow_drain(43.0, [*log, "drained in 43.0 s"])
    assert found is not None and found.reason == "results to fetch: 1"
    for no_reason in ([], ["draining for 10 s, for at most 9 s more; left: nothing"]):
        unknown = slow_drain(43.0, no_reason)
        assert unknown is not None and not unknown.reason
    assert slow_drain(2.0, log) is None
