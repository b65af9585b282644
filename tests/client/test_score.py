import json
from typing import Any

import numpy as np
import pytest

from coppice import BadAnswer, GroupRequest, Prompt, ScoreItem, WeightsConstraint
from coppice.wire.score import ScoreAnswer, ScoredItem, ScoredResponse
from tests.client.app import App, answering
from tests.client.conftest import Connect


def scored(*lengths: int) -> ScoredItem:
    responses = [ScoredResponse(logprobs=[-0.5] * length, version="v7") for length in lengths]
    return ScoredItem(num_prompt_tokens=4, responses=responses)


def test_responses_are_scored_in_order(connect: Connect) -> None:
    app = App(answering(ScoreAnswer(items=[scored(2, 3), scored(1)])))
    items: Any = [("hello", [[5, 6], np.array([7, 8, 9])]), ([1, 2], ([3],))]
    first, second = connect(app).score(items, WeightsConstraint(exact_version="v7"), timeout=9)
    assert [array.tolist() for array in first.logprobs] == [[-0.5] * 2, [-0.5] * 3]
    assert first.logprobs[0].dtype == np.float32
    assert first.num_prompt_tokens == 4
    assert (first.versions, second.versions) == (("v7", "v7"), ("v7",))
    assert (app.request.method, app.request.url.path) == ("POST", "/v1/score")
    assert app.request.extensions["timeout"]["read"] == 9
    assert json.loads(app.request.content) == {
        "items": [
            {"prompt": {"text": "hello"}, "responses": [[5, 6], [7, 8, 9]]},
            {"prompt": {"token_ids": [1, 2]}, "responses": [[3]]},
        ],
        "weights": {"exact_version": "v7"},
    }


def test_wire_objects_are_sent_unchanged(connect: Connect) -> None:
    app = App(answering(ScoreAnswer(items=[scored(1), scored(1)])))
    item = ScoreItem(prompt=Prompt(text="a"), responses=[[1]])
    connect(app).score([item, (GroupRequest(prompt=Prompt(text="b"), n=4), [[2]])])
    assert json.loads(app.request.content)["items"] == [
        {"prompt": {"text": "a"}, "responses": [[1]]},
        {"prompt": {"text": "b"}, "responses": [[2]]},
    ]


@pytest.mark.parametrize(
    ("items", "error", "words"),
    [
        ([], ValueError, "items"),
        (["hello"], TypeError, "item 0 is not a pair"),
        ([("hello", [[]])], ValueError, "responses"),
        ([("hello", [])], ValueError, "responses"),
        ([("hello", ["text"])], TypeError, "response of item 0 contains str"),
        ([("a", [[1]]), (5, [[1]])], TypeError, "the prompt of item 1 is int"),
        ([("hello", [[-1]])], ValueError, "responses"),
    ],
)
def test_invalid_score_request_is_never_sent(
    connect: Connect, items: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        connect(App()).score(items)


@pytest.mark.parametrize("items", [[], [scored(2)], [scored(1, 1)], [scored(1), scored(1)]])
def test_answer_of_another_shape_is_a_bad_answer(connect: Connect, items: list[ScoredItem]) -> None:
    with pytest.raises(BadAnswer):
        connect(App(answering(ScoreAnswer(items=items)))).score([("hello", [[1]])])
