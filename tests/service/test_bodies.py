"""Request body parsing: integers, limits, and bounded error reports."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
from fastapi import Request

from coppice.wire.base import MAX_TOKENS
from coppice.wire.rollouts import RolloutRequest
from service.config.limits import LimitsSettings
from service.errors import BodyTooLarge, InvalidJson, InvalidRequest, QuotaExceeded
from service.fair_threads import FairThreads
from service.http import bodies
from service.http.bodies import (
    INLINE_BYTES,
    MAX_FIELD_ERRORS,
    MAX_JSON_VALUES,
    Bodies,
    parse_large,
)
from service.log_context import key_name

MAX_PEAK_MIB = 400
"""Limit for a body within the default limits, in addition to the body itself."""
Parse = Callable[[bytes, type[RolloutRequest]], RolloutRequest]


@pytest.fixture(params=[bodies.parse, parse_large], ids=["inline", "large"])
def parse(request: pytest.FixtureRequest) -> Parse:
    parse: Parse = request.param
    return parse


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


@pytest.mark.parametrize("index", [0, 1, 49_999])
def test_invalid_token_id_is_reported_by_its_index(parse: Parse, index: int) -> None:
    token_ids = ["1"] * 50_000
    token_ids[index] = "-2"
    assert refused(rollout_body(",".join(token_ids)), parse).errors == [
        {
            "location": f"groups.0.prompt.token_ids.{index}",
            "message": "Input should be an integer at least 0 and below 2147483648",
        }
    ]


def test_long_token_list_keeps_its_order_and_bounds(parse: Parse) -> None:
    token_ids = list(range(50_000))
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


def large(num_lists: int = 1, num_tokens: int = 500_000) -> bytes:
    token_ids = ",".join(map(str, range(num_tokens)))
    groups = ",".join([f'{{"prompt": {{"token_ids": [{token_ids}]}}}}'] * num_lists)
    return f'{{"groups": [{groups}]}}'.encode()


def sent(body: bytes, content_type: str = "application/json") -> Request:
    """Request with a body that arrives in chunks."""
    chunks = [body[start : start + 2**18] for start in range(0, len(body), 2**18)]
    messages = [{"type": "http.request", "body": each, "more_body": True} for each in chunks]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    arriving = iter(messages)

    async def receive() -> Any:
        return next(arriving)

    headers = [(b"content-type", content_type.encode())]
    return Request({"type": "http", "headers": headers}, receive)


def bodies_of(key_bytes: int = 2**26, total_bytes: int = 2**27, **limits: int) -> Bodies:
    threads = FairThreads("requests", key_bytes=key_bytes, total_bytes=total_bytes)
    return Bodies(LimitsSettings(**limits), threads)


async def test_event_loop_runs_while_a_large_body_is_parsed() -> None:
    """The body has nearly as many values as are accepted.

    Calls of pydantic hold the GIL, even in a thread. A single one leaves 2 to 4 iterations, two
    calls that check the token ids themselves leave 4 to 7. Between the lists others can run.
    """
    body = large(2000, 250)
    assert 0.95 * MAX_JSON_VALUES < body.count(b",") < MAX_JSON_VALUES
    reading = asyncio.create_task(bodies_of().read_json(sent(body), RolloutRequest))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0.001)
        turns += 1
    await reading
    assert turns >= 10


async def test_key_with_too_many_bytes_of_bodies_is_refused_and_others_are_not() -> None:
    body = large()
    with_bodies = bodies_of(key_bytes=5 * len(body), total_bytes=7 * len(body))

    async def parse_as(key: str) -> int:
        key_name.set(key)
        return len((await with_bodies.read_json(sent(body), RolloutRequest)).groups)

    of_one = [asyncio.create_task(parse_as("one")) for _ in range(7)]
    await asyncio.sleep(0)
    assert await asyncio.create_task(parse_as("another")) == 1
    ended = await asyncio.gather(*of_one, return_exceptions=True)
    assert {type(end) for end in ended} == {int, QuotaExceeded}
    assert await asyncio.create_task(parse_as("one")) == 1, "no bytes are left behind"


async def test_small_bodies_are_read_while_large_ones_fill_the_limit() -> None:
    body = large()
    with_bodies = bodies_of(key_bytes=len(body), total_bytes=len(body))
    reading = asyncio.create_task(with_bodies.read_json(sent(body), RolloutRequest))
    while not with_bodies._threads.limiter._all.num_bytes:
        await asyncio.sleep(0)
    assert (await with_bodies.read_json(sent(rollout_body()), RolloutRequest)).groups
    await reading


@pytest.mark.parametrize(
    "body", [b"[" * 500_000, b'{"groups": ' + b'{"a":' * 500_000, b'{"groups": "' + b'\\"' * 10**6]
)
async def test_malformed_bodies_are_refused(body: bytes) -> None:
    assert len(body) > INLINE_BYTES
    with pytest.raises(InvalidJson):
        await bodies_of().read_json(sent(body), RolloutRequest)


async def test_json_above_the_limit_is_refused_and_the_packed_form_named() -> None:
    body = b" " * 4097
    limited = bodies_of(max_json_bytes=4096)
    with pytest.raises(BodyTooLarge, match="for JSON: .* as application/vnd.coppice.safetensors"):
        await limited.read_packable(sent(body), RolloutRequest)
    with pytest.raises(BodyTooLarge, match="the limit of 4096 bytes$"):
        await limited.read_json(sent(body), RolloutRequest)


@pytest.mark.parametrize("piece", [b"1,", b"[],", b"{},", b'",",'])
async def test_json_with_too_many_values_is_refused_before_it_is_parsed(piece: bytes) -> None:
    """Parsing it would hold the GIL for too long. Commas in a string are counted, too."""
    number = MAX_JSON_VALUES // sum(map(piece.count, [b",", b"[", b"{"]))

    def of(number: int) -> Request:
        return sent(b'{"groups": [' + piece * number + b"1]}")

    with pytest.raises(InvalidRequest):
        await bodies_of().read_json(of(number - 2), RolloutRequest)
    with pytest.raises(BodyTooLarge, match=r"more than 524,288 values.* opening brackets$"):
        await bodies_of().read_json(of(number), RolloutRequest)
    with pytest.raises(BodyTooLarge, match=r"brackets: send the request packed, as application/"):
        await bodies_of().read_packable(of(number), RolloutRequest)
    with pytest.raises(InvalidRequest):
        await bodies_of().read_json(of(number), RolloutRequest, limit=2**23)


WORST = {
    "spans": """
span = b'{"version":"v","start":0,"end":1}'
sample = b'{"token_ids":[1],"logprobs":[-1],"versions":[' + b",".join([span] * 4096) + b"]}"
samples = b",".join([sample] * (limit // len(sample) - 1))
body = b'{"groups":[{"prompt":{"text":"a"}}],"continue_from":{"samples":[' + samples + b"]}}"
""",
    "objects": """
body = b'{"x":[' + b",".join([b'{"a":1}'] * (limit // 8 - 9)) + b"]}"
""",
    "arrays": """
body = b'{"x":[' + b",".join([b"[]"] * (limit // 3 - 9)) + b"]}"
""",
    "strings": """
body = b'{"x":[' + b",".join(b'"%06x"' % i for i in range(limit // 9 - 9)) + b"]}"
""",
    "numbers": """
token_ids = b",".join([b"1234.0"] * (limit // 14 - 99))
group = b'{"prompt":{"token_ids":[' + token_ids + b"]}}"
body = b'{"groups":[' + b",".join([group] * 2) + b"]}"
""",
    "members": """
body = b"{" + b",".join(b'"%06x":0' % i for i in range(limit // 11 - 9)) + b"}"
""",
}
PROGRAM = """
import sys
from coppice.wire.rollouts import RolloutRequest
from service.http.bodies import parse_large
from service.errors import InvalidRequest
from service.config.limits import LimitsSettings

limit = LimitsSettings().max_json_bytes
{body}
assert 0.9 * limit < len(body) <= limit
if sys.argv[1:]:
    try:
        parsed = parse_large(body, RolloutRequest)
    except InvalidRequest:
        pass
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["VmHWM"].split()[0] if sys.argv[1:] else status["VmRSS"].split()[0])
"""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "objects" else (pytest.mark.exhaustive,))
        for case in WORST
    ],
)
def test_memory_of_the_worst_bodies_is_bounded(case: str) -> None:
    def kib(*arguments: str) -> int:
        program = PROGRAM.format(body=WORST[case])
        command = [sys.executable, "-c", program, *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert (kib("parse") - kib()) / 1024 < MAX_PEAK_MIB
