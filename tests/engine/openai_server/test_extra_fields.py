"""Weights versions and supports in responses and events of vLLM's serving classes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from engine.openai_server.extra_fields import ExtraFields
from engine.protocol.openai_server import SampleEnd

BOTH = ExtraFields(return_weight_versions=True, return_support=True)


def end(version: str, support: object = None) -> SampleEnd:
    return SampleEnd(
        finish_reason="stop",
        stop_reason=None,
        versions=[{"version": version, "start": 0, "end": 1}],
        support=support,
    )


ENDS = {index: end(f"v{index}", index) for index in range(4)}


def fields(index: int) -> dict[str, Any]:
    return {
        "weight_versions": [{"version": f"v{index}", "start": 0, "end": 1}],
        "support": index,
    }


def choice(index: int, reason: str | None = "stop") -> dict[str, Any]:
    return {"index": index, "finish_reason": reason}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (
            {"choices": [choice(3), choice(0)]},
            {"choices": [choice(3) | fields(3), choice(0) | fields(0)]},
        ),
        ({"choices": [choice(0, None)]}, {"choices": [choice(0, None)]}),
        ({"choices": [], "usage": {}}, {"choices": [], "usage": {}}),
        ({"object": "response"}, {"object": "response"} | fields(0)),
        ({"type": "message"}, {"type": "message"} | fields(0)),
        ({"type": "message_delta"}, {"type": "message_delta"} | fields(0)),
        (
            {"type": "response.completed", "response": {"object": "response"}},
            {"type": "response.completed", "response": {"object": "response"} | fields(0)},
        ),
        (
            {"type": "response.created", "response": {}},
            {"type": "response.created", "response": {}},
        ),
        ({"type": "message_start", "message": {}}, {"type": "message_start", "message": {}}),
        ({"count": 1, "tokens": [1]}, {"count": 1, "tokens": [1]}),
        ({"input_tokens": 3}, {"input_tokens": 3}),
        ({"error": {"code": 500}}, {"error": {"code": 500}}),
    ],
)
def test_fields_are_added_where_a_sample_ends(
    response: dict[str, Any], expected: dict[str, Any]
) -> None:
    BOTH.add(response, ENDS)
    assert response == expected


def test_only_requested_fields_are_added() -> None:
    for extra, names in (
        (ExtraFields(return_support=True), {"support"}),
        (ExtraFields(return_weight_versions=True), {"weight_versions"}),
    ):
        response: dict[str, Any] = {"object": "response"}
        extra.add(response, ENDS)
        assert response.keys() == {"object", *names}


@pytest.mark.parametrize("name", ["return_weight_versions", "return_support"])
def test_fields_are_taken_from_the_body(name: str) -> None:
    for value in (True, False, None):
        body = {name: value, "model": "m"}
        extra = ExtraFields.taken_from(body)
        assert body == {"model": "m"}
        assert getattr(extra, name) == bool(extra) == (value is True)
    for wrong in ("yes", [True], 2, {"a": 1}):
        with pytest.raises(VLLMValidationError, match=name):
            ExtraFields.taken_from({name: wrong})


async def test_other_events_are_passed_on_unchanged() -> None:
    given = [
        'data: {"choices": [{"index": 1, "finish_reason": null}], "text": "é"}\n\n',
        'event: response.completed\ndata: {"type": "response.completed", "response": {}}\n\n',
        "data: [DONE]\n\n",
        ": comment\n\n",
    ]

    async def events() -> AsyncIterator[str]:
        for event in given:
            yield event

    first, second, *rest = [event async for event in BOTH.in_events(events(), ENDS)]
    assert first == given[0] and rest == given[2:]
    head, _, data = second.partition("data: ")
    assert head == "event: response.completed\n" and data.endswith("}\n\n")
    assert json.loads(data)["response"] == fields(0)


def test_logprobs_of_token_ids_have_the_name_of_the_token() -> None:
    extra = ExtraFields.taken_from({"sampling_params": {"logprobs": 1}})
    top = [{"token_id": 5, "logprob": -1.0}]
    entry = {"token_id": 7, "logprob": -2.0, "top_logprobs": top}
    response: dict[str, Any] = {"choices": [{"index": 0, "logprobs": {"content": [entry]}}]}
    extra.add(response, {})
    [found] = response["choices"][0]["logprobs"]["content"]
    assert (found["token"], found["top_logprobs"][0]["token"]) == ("token_id:7", "token_id:5")


@pytest.mark.parametrize("logprobs", [None, {"content": None}])
def test_choices_without_logprobs_stay_as_they_are(logprobs: Any) -> None:
    extra = ExtraFields.taken_from({"sampling_params": {"logprobs": 1}})
    response: dict[str, Any] = {"choices": [{"index": 0, "logprobs": logprobs}]}
    extra.add(response, {})
    assert response == {"choices": [{"index": 0, "logprobs": logprobs}]}
