import json

import numpy as np
import pytest

from coppice import (
    BadAnswer,
    EndRecord,
    EngineUnavailable,
    Problem,
    Record,
    RolloutResult,
    WeightsConstraint,
)
from coppice.wire.sampling import Sampling
from tests.client.answers import ANSWER, LINES, RECORDS, USAGE
from tests.client.app import App, Body, answering, streaming
from tests.client.conftest import Connect


def stream_of(records: list[Record]) -> Body:
    return Body(record.model_dump_json().encode() + b"\n" for record in records)


def assert_is_the_answer(result: RolloutResult) -> None:
    assert (result.id, result.outcome, result.usage) == ("r1", "done", USAGE)
    assert [(group.id, group.index) for group in result.groups] == [("g0", 0), ("g1", 1)]
    assert [[sample.index for sample in group.samples] for group in result.groups] == [[0, 1], [0]]
    sample = result.groups[0].samples[1]
    assert sample.token_ids.dtype == np.int64
    assert sample.token_ids.tolist() == [5, 6, 8]
    assert sample.logprobs.dtype == np.float32
    assert sample.logprobs.tolist() == [-0.5, -1.25, 0.0]


def test_rollout_is_assembled_from_its_records(connect: Connect) -> None:
    assert_is_the_answer(connect(App(streaming(Body(LINES)))).rollout(["hello", [1, 2]], n=2))


def test_every_option_of_a_rollout_is_sent(connect: Connect) -> None:
    app = App(streaming(Body(LINES)))
    connect(app).rollout(
        ["hello", [1, 2]],
        n=4,
        seed=10,
        max_tokens=32,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_token_ids=(3, 4),
        ignore_eos=True,
        weights=WeightsConstraint(min_version="v7"),
        priority=-1,
        speculation=False,
        stream_tokens=True,
    )
    assert app.request.method == "POST"
    assert app.request.url.path == "/v1/rollouts"
    sampling = Sampling(
        max_tokens=32, temperature=0.5, top_p=0.9, top_k=5, stop_token_ids=[3, 4], ignore_eos=True
    )
    assert json.loads(app.request.content) == {
        "groups": [
            {"prompt": {"text": "hello"}, "n": 4, "seed": 10},
            {"prompt": {"token_ids": [1, 2]}, "n": 4, "seed": 11},
        ],
        "sampling": sampling.model_dump(exclude_none=True),
        "weights": {"min_version": "v7"},
        "priority": -1,
        "speculation": False,
        "stream": True,
        "stream_tokens": True,
    }


def test_failed_rollout_is_raised_as_its_problem(connect: Connect) -> None:
    problem = Problem(type="/problems/engine_dead", title="Dead", status=503, code="engine_dead")
    end = EndRecord(outcome="failed", usage=USAGE, problem=problem)
    client = connect(App(streaming(stream_of([*RECORDS[:-1], end]))))
    with pytest.raises(EngineUnavailable):
        client.rollout(["hello"])


def test_partial_rollout_is_a_result(connect: Connect) -> None:
    end = EndRecord(outcome="partial", usage=USAGE)
    client = connect(App(streaming(stream_of([*RECORDS[:-1], end]))))
    assert client.rollout(["hello"]).outcome == "partial"


def test_samples_without_their_group_are_a_bad_answer(connect: Connect) -> None:
    client = connect(App(streaming(stream_of([*RECORDS[:2], RECORDS[-1]]))))
    with pytest.raises(BadAnswer, match=r"groups \[1\]"):
        client.rollout(["hello"])


def test_stream_without_its_start_record_is_a_bad_answer(connect: Connect) -> None:
    client = connect(App(streaming(stream_of(RECORDS[1:]))))
    with pytest.raises(BadAnswer):
        client.rollout(["hello"])


def test_aborted_rollout_returns_its_tokens_so_far(connect: Connect) -> None:
    app = App(answering(ANSWER))
    assert_is_the_answer(connect(app).abort("r/1 x"))
    assert app.request.method == "DELETE"
    assert app.request.url.raw_path == b"/v1/rollouts/r%2F1%20x"


def test_progress_counts_samples(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    app = App(streaming(Body(LINES)))
    assert_is_the_answer(connect(app).rollout(["hello"], n=3, progress=True))
    assert "3/3" in capsys.readouterr().err


def test_nothing_is_printed_by_default(
    connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(App(streaming(Body(LINES)))).rollout(["hello"], n=3)
    assert capsys.readouterr() == ("", "")
