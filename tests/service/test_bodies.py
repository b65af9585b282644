"""Request body parsing: integers, limits, and bounded error reports."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

from coppice.wire.base import MAX_TOKENS, SLICE_TOKENS
from coppice.wire.rollouts import RolloutRequest
from service.config.settings import LimitsSettings
from service.http import bodies
from service.http.bodies import INLINE_BYTES, MAX_FIELD_ERRORS, Bodies, parse_in_steps
from service.http.errors import BodyTooLarge, InvalidJson, InvalidRequest, QuotaExceeded
from service.http.incremental_json_parser import MAX_MEMBERS, JsonLimits
from service.observability.logs import key_name

LIMITS = JsonLimits(values=10**7, containers=10**6)

Parse = Callable[[bytes, type[RolloutRequest]], RolloutRequest]


@pytest.fixture(params=["inline", "in steps"])
def parse(request: pytest.FixtureRequest) -> Parse:
    if request.param == "inline":
        return bodies.parse
    return lambda body, model: parse_in_steps(body, model, LIMITS)


def rollout_body(token_ids: str = "1", rest: str = "") -> bytes:
    return f'{{"groups": [{{"prompt": {{"token_ids": [{token_ids}]}}{rest}}}]}}'.encode()


def refused(body: bytes, parse: Parse) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, RolloutRequest)
    return caught.value


def processor_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


@pytest.mark.parametrize("number", ["56", "56.0", "5.6e1", "56.000", "560E-1"])
def test_whole_number_is_an_integer_in_any_notation(parse: Parse, number: str) -> None:
    parsed = parse(rollout_body(f"1, {number}", f', "n": {number}'), RolloutRequest)
    assert parsed.groups[0].prompt.token_ids == [1, 56]
    assert parsed.groups[0].n == 56
    assert type(parsed.groups[0].n) is int


def test_integers_are_accepted_as_floats(parse: Parse) -> None:
    body = b'{"groups": [{"prompt": {"text": "a"}, "n": 2.0}], "sampling": {"temperature": 1.0}}'
    assert parse(body, RolloutRequest).sampling.temperature == 1.0


@pytest.mark.parametrize(
    "number", ["56.5", "true", '"5"', "null", "[5]", "1e300", "NaN", "Infinity", "-1.0", "1e999"]
)
def test_nothing_else_is_an_integer(parse: Parse, number: str) -> None:
    assert refused(rollout_body(number), parse).errors == [
        {"location": "groups.0.prompt.token_ids.0", "message": ANY}
    ]
    assert refused(rollout_body("1.0", f', "n": {number}'), parse).errors == [
        {"location": "groups.0.n", "message": ANY}
    ]


@pytest.mark.parametrize(
    "body",
    [
        rollout_body() + b"x",
        rollout_body() + rollout_body(),
        b"[" * 100_000,
        b'{"groups": [{"prompt": {"text": "\\ud800"}}]}',
        b'{"groups": [{"prompt": {"text": "\xed\xa0\x80"}}]}',
        b"\xef\xbb\xbf" + rollout_body(),
        rollout_body().decode().encode("utf-16"),
    ],
    ids=["garbage", "two", "deep", "surrogate", "encoded surrogate", "byte order mark", "utf-16"],
)
def test_invalid_json_or_utf_8_is_reported_as_such(parse: Parse, body: bytes) -> None:
    with pytest.raises(InvalidJson):
        parse(body, RolloutRequest)


def test_first_of_a_million_invalid_token_ids_is_reported(parse: Parse) -> None:
    """Listing all of them takes several hundred times as long as Python's parser takes."""
    body = rollout_body(", ".join(["1"] * 7 + ['""'] * 1_000_000))
    reference = min(processor_seconds(lambda: json.loads(body)) for _ in range(5))
    errors: list[InvalidRequest] = []
    assert processor_seconds(lambda: errors.append(refused(body, parse))) < 120 * reference
    [error] = errors
    assert [fault["location"] for fault in error.errors or []] == ["groups.0.prompt.token_ids.7"]


@pytest.mark.parametrize("index", [0, SLICE_TOKENS - 1, SLICE_TOKENS, 3 * SLICE_TOKENS + 5])
def test_invalid_token_id_is_reported_by_its_index(parse: Parse, index: int) -> None:
    token_ids = ["1"] * (3 * SLICE_TOKENS + 6)
    token_ids[index] = "-2"
    assert refused(rollout_body(",".join(token_ids)), parse).errors == [
        {
            "location": f"groups.0.prompt.token_ids.{index}",
            "message": "Input should be an integer at least 0 and below 2147483648",
        }
    ]


def test_long_token_list_keeps_its_order_and_bounds(parse: Parse) -> None:
    token_ids = list(range(2 * SLICE_TOKENS + 1))
    parsed = parse(rollout_body(",".join(map(str, token_ids))), RolloutRequest)
    assert parsed.groups[0].prompt.token_ids == token_ids
    [fault] = refused(rollout_body("1" + ",1" * MAX_TOKENS), parse).errors or []
    assert fault["location"] == "groups.0.prompt.token_ids"


@pytest.mark.parametrize("number", [1, MAX_FIELD_ERRORS, MAX_FIELD_ERRORS + 1])
def test_errors_are_counted_and_the_first_ones_listed_up_to_a_limit(
    parse: Parse, number: int
) -> None:
    unknown: dict[str, Any] = {f"x{i}": 0 for i in range(number)}
    error = refused(json.dumps({**json.loads(rollout_body()), **unknown}).encode(), parse)
    assert error.detail == f"{number} field(s) are invalid"
    listed = 0 if number > MAX_FIELD_ERRORS else min(number, 16)
    assert len(error.errors or []) == listed


def test_integer_bounds_are_in_the_error(parse: Parse) -> None:
    (error,) = refused(rollout_body("1", ', "n": 0'), parse).errors or []
    assert error["message"] == "Input should be an integer at least 1 and at most 1024"


def large(num_lists: int = 3) -> bytes:
    token_ids = ",".join(map(str, range(500_000)))
    groups = ",".join([f'{{"prompt": {{"token_ids": [{token_ids}]}}}}'] * num_lists)
    return f'{{"groups": [{groups}]}}'.encode()


async def turns_during(bodies: Bodies, body: bytes) -> int:
    """Iterations of the event loop while the body is parsed."""
    parsed = asyncio.create_task(bodies.parsed(body, RolloutRequest))
    turns = 0
    while not parsed.done():
        await asyncio.sleep(0.001)
        turns += 1
    await parsed
    return turns


async def test_event_loop_runs_while_a_large_body_is_parsed() -> None:
    """A single pydantic call holds the GIL throughout, even in a thread: it leaves 2 iterations."""
    with_bodies = Bodies(LimitsSettings())
    assert await turns_during(with_bodies, large()) >= 10
    with_bodies.close()


async def test_key_with_too_many_queued_bodies_is_refused_and_others_are_not() -> None:
    body = large(1)
    with_bodies = Bodies(LimitsSettings(max_body_bytes=len(body)))

    async def parse_as(key: str) -> int:
        key_name.set(key)
        return len((await with_bodies.parsed(body, RolloutRequest)).groups)

    of_one = [asyncio.create_task(parse_as("one")) for _ in range(6)]
    await asyncio.sleep(0)
    assert await asyncio.create_task(parse_as("another")) == 1
    ended = await asyncio.gather(*of_one, return_exceptions=True)
    assert [type(end) for end in ended] == [int] * 5 + [QuotaExceeded]
    with_bodies.close()


@pytest.mark.parametrize("item", ["1", "{}", "[]", '""', '{"a": [1]}'])
def test_values_are_counted_before_they_are_built(item: str) -> None:
    body = f'{{"groups": [{", ".join([item] * 2000)}]}}'.encode()
    with pytest.raises(BodyTooLarge, match="values|objects"):
        parse_in_steps(body, RolloutRequest, JsonLimits(values=1999, containers=1500))


def test_commas_and_brackets_in_strings_are_not_values() -> None:
    body = json.dumps({"groups": [{"prompt": {"text": ',[{]}"' * 5000}}]}).encode()
    parsed = parse_in_steps(body, RolloutRequest, JsonLimits(values=10, containers=4))
    assert parsed.groups[0].prompt.text == ',[{]}"' * 5000


def test_members_of_an_object_are_bounded() -> None:
    """Every unknown member would be an error of its own."""
    members = ", ".join(f'"{i}": 0' for i in range(MAX_MEMBERS + 1))
    with pytest.raises(BodyTooLarge, match="members"):
        parse_in_steps(f"{{{members}}}".encode(), RolloutRequest, LIMITS)


@pytest.mark.parametrize(
    "body", [b"[" * 10**6, b'{"groups": ' + b'{"a":' * 10**6, b'{"groups": "' + b'\\"' * 10**6]
)
async def test_malformed_bodies_are_refused_before_they_are_parsed(body: bytes) -> None:
    assert len(body) > INLINE_BYTES
    with_bodies = Bodies(LimitsSettings())
    with pytest.raises(InvalidJson):
        await with_bodies.parsed(body, RolloutRequest)
    with_bodies.close()
