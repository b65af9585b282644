"""How a body becomes a request: whole numbers, and faults without end."""

import json
import time
from typing import Any
from unittest.mock import ANY

import pytest

from coppice.wire.rollouts import RolloutRequest
from service.bodies import MAX_FAULTS, parse
from service.errors import InvalidJson, InvalidRequest


def asked(token_ids: str = "1", rest: str = "") -> bytes:
    return f'{{"groups": [{{"prompt": {{"token_ids": [{token_ids}]}}{rest}}}]}}'.encode()


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, RolloutRequest)
    return caught.value


@pytest.mark.parametrize("number", ["56", "56.0", "5.6e1", "56.000", "560E-1"])
def test_a_whole_number_is_an_integer_however_it_is_written(number: str) -> None:
    parsed = parse(asked(f"1, {number}", f', "n": {number}'), RolloutRequest)
    assert parsed.groups[0].prompt.token_ids == [1, 56]
    assert parsed.groups[0].n == 56
    assert type(parsed.groups[0].n) is int


def test_whole_numbers_do_for_fractions() -> None:
    body = b'{"groups": [{"prompt": {"text": "a"}, "n": 2.0}], "sampling": {"temperature": 1.0}}'
    assert parse(body, RolloutRequest).sampling.temperature == 1.0


@pytest.mark.parametrize(
    "number", ["56.5", "true", '"5"', "null", "[5]", "1e300", "NaN", "Infinity", "-1.0", "1e999"]
)
def test_nothing_else_is_an_integer(number: str) -> None:
    assert refused(asked(number)).errors == [
        {"location": "groups.0.prompt.token_ids.0", "message": ANY}
    ]
    assert refused(asked("1.0", f', "n": {number}')).errors == [
        {"location": "groups.0.n", "message": ANY}
    ]


@pytest.mark.parametrize(
    "body",
    [
        asked() + b"x",
        asked() + asked(),
        b"[" * 100_000,
        b'{"groups": [{"prompt": {"text": "\\ud800"}}]}',
        b'{"groups": [{"prompt": {"text": "\xed\xa0\x80"}}]}',
        b"\xef\xbb\xbf" + asked(),
        asked().decode().encode("utf-16"),
    ],
    ids=["garbage", "two", "deep", "surrogate", "encoded surrogate", "byte order mark", "utf-16"],
)
def test_what_is_no_json_in_utf_8_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(InvalidJson):
        parse(body, RolloutRequest)


def test_of_a_million_wrong_token_ids_the_first_is_named() -> None:
    """Listing them all would hold up the event loop for seconds."""
    body = asked(", ".join(["1"] * 7 + ['""'] * 1_000_000))
    began = time.process_time()
    error = refused(body)
    assert time.process_time() - began < 2
    assert [fault["location"] for fault in error.errors or []] == ["groups.0.prompt.token_ids.7"]


@pytest.mark.parametrize("number", [1, MAX_FAULTS, MAX_FAULTS + 1])
def test_faults_are_counted_and_the_first_named_unless_they_are_legion(number: int) -> None:
    unknown: dict[str, Any] = {f"x{i}": 0 for i in range(number)}
    error = refused(json.dumps({**json.loads(asked()), **unknown}).encode())
    assert error.detail == f"{number} field(s) are wrong"
    listed = 0 if number > MAX_FAULTS else min(number, 16)
    assert len(error.errors or []) == listed
