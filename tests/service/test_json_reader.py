"""Incremental JSON parsing returns the same value or refusal as parsing at once."""

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from pydantic_core import from_json

from service.http.errors import InvalidJson
from service.http.incremental_json_parser import JsonLimits, read_value

MALFORMED = object()
MAX_PEAK_MIB = 512
"""Limit for a body within the default limits, in addition to the body itself."""


def random_value(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if depth == 0 or kind < 0.35:
        texts = ["a,b", 'q"\\', "[{", "\u00e9\n" * draw.randrange(9), "x" * draw.randrange(60)]
        return draw.choice([1, 2.5, True, None, -5, *texts])
    if kind < 0.7:
        return [random_value(draw, depth - 1) for _ in range(draw.randrange(7))]
    keys = draw.choices(["a", "b,", "c}", '"', "k1", "k2"], k=draw.randrange(6))
    return {key: random_value(draw, depth - 1) for key in keys}


def changed(draw: random.Random, text: bytes) -> bytes:
    """One byte inserted, removed or replaced: usually malformed."""
    at, byte = draw.randrange(len(text)), draw.choice([b'"', *map(bytes, zip(b"[]{},: \\1a"))])
    return text[:at] + draw.choice([b"", byte]) + text[at + draw.choice([0, 1]) :]


def in_one_piece(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return MALFORMED


def in_pieces(text: bytes, limits: JsonLimits) -> Any:
    try:
        return read_value(text, limits)
    except InvalidJson:
        return MALFORMED


@pytest.mark.parametrize(
    ("piece", "step"),
    [
        *(pytest.param(*sizes, marks=pytest.mark.exhaustive) for sizes in ((1, 7), (5, 16))),
        (20, 64),
        (60, 100),
    ],
)
def test_incremental_parsing_equals_parsing_at_once(piece: int, step: int) -> None:
    limits = JsonLimits(values=10**6, containers=10**6, piece_bytes=piece, step_bytes=step)
    draw = random.Random(piece)
    for _ in range(1500):
        value, indent = random_value(draw, 5), draw.choice([None, 1])
        text = json.dumps(value, indent=indent, ensure_ascii=draw.random() < 0.5).encode()
        for variant in (text, *(changed(draw, text) for _ in range(4))):
            assert in_pieces(variant, limits) == in_one_piece(variant), variant


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"1",
        b'"' + b"x" * 10**6 + b'"',
        b'"' + b'\\"' * 10**6 + b'"',
        b"[" + b" " * 10**6 + b"]",
        b'{"a": [' + b"1, " * 10**5 + b'1], "b": {"c": [' + b'"", ' * 10**5 + b"{}]}}",
        b"[" + b"1, " * 10**6 + b"]",
        b"[" + b"1, " * 10**6 + b"1] 2",
        b'["' + "\u00e9".encode() * 10**6 + b'", []]',
        b'["' + b"\xe9" * 10**6 + b'", []]',
    ],
    ids=range(11),
)
def test_long_documents(text: bytes) -> None:
    assert in_pieces(text, JsonLimits(values=10**7, containers=10)) == in_one_piece(text)


WORST = {
    "spans": """
span = b'{"version":"v","start":0,"end":1}'
sample = b'{"token_ids":[1],"logprobs":[-1],"versions":[' + b",".join([span] * 4096) + b"]}"
samples = b",".join([sample] * (limits.max_json_containers // 4100 - 1))
body = b'{"groups":[{"prompt":{"text":"a"}}],"continue_from":{"samples":[' + samples + b"]}}"
""",
    "objects": """
item = b'{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6}'
body = b'{"x":[' + b",".join([item] * (limits.max_json_containers - 9)) + b"]}"
""",
    "strings": """
count = min(limits.max_json_values, limits.max_body_bytes // 9) - 9
body = b'{"x":[' + b",".join(b'"%06x"' % i for i in range(count)) + b"]}"
""",
    "numbers": """
token_ids = b",".join([b"123456.0"] * 1_000_000)
group = b'{"prompt":{"token_ids":[' + token_ids + b"]}}"
body = b'{"groups":[' + b",".join([group] * 3) + b"]}"
""",
}
PROGRAM = """
import sys
from coppice.wire.rollouts import RolloutRequest
from service.http.bodies import parse_in_steps
from service.http.errors import InvalidRequest
from service.http.incremental_json_parser import JsonLimits
from service.config.settings import LimitsSettings

limits = LimitsSettings()
{body}
assert len(body) <= limits.max_body_bytes
if sys.argv[1:]:
    json = JsonLimits(values=limits.max_json_values, containers=limits.max_json_containers)
    try:
        parsed = parse_in_steps(body, RolloutRequest, json)
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
