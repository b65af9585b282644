"""Guard of the processor time of a token around the model; client and record of the benchmark."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from bench import host_path
from bench.harness.host_path import micro
from bench.harness.host_path.arms import PACKED, Arm, Measurement
from bench.harness.host_path.client_process import Exchange, result
from bench.harness.host_path.loads import ROUTES, Load, requests_of
from bench.harness.host_path.micro_cases import CASES
from bench.harness.random_model import write_model

BOUNDS = {micro.ENGINE_CORE: 50.0, micro.SERVICE: 4.4}
"""Largest permitted time per token by stages, in iterations of the calibration loop: one and a half
times what EngineCore takes, and twice what the service takes, whose times are short and vary more.
"""
PROCESSES = pytest.mark.parametrize("stages", BOUNDS, ids=["EngineCore", "service"])
ROUNDS = 8


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> micro.MicroRound:
    model = write_model(tmp_path_factory.mktemp("models") / "model", host_path.MODEL_SHAPE)
    with micro.micro_process("ours", model) as process:
        rounds = [process.run(CASES[0]) for _ in range(1 + ROUNDS)]
    return micro.best(rounds[1:])


@pytest.mark.engine
@PROCESSES
def test_token_takes_no_more_processor_time_than_its_bound(
    measured: micro.MicroRound, stages: tuple[str, ...]
) -> None:
    assert measured.sum(stages) / micro.REFERENCE < BOUNDS[stages], measured.stages


def test_times_of_a_disturbed_round_are_divided_by_its_calibration() -> None:
    stages = dict.fromkeys(micro.STAGES, 1.0)
    calm = micro.MicroRound(stages=stages, calibration=micro.REFERENCE)
    busy = micro.MicroRound(stages=dict.fromkeys(stages, 2.0), calibration=2.5 * micro.REFERENCE)
    assert micro.best([calm]).sum() == pytest.approx(len(stages))
    assert micro.best([calm, busy]).sum() == pytest.approx(0.8 * len(stages))


LOAD = Load(num_groups=1, max_tokens=3)
STREAM = (
    b'{"type":"start","id":"r"}\n',
    b'{"type":"tokens","token_ids":[1]}\n',
    b'{"type":"tokens","token_ids":[2,3]}\n',
    b'{"type":"sample","sample":{"token_ids":[1,2,3]}}\n',
)
PACKED_HEAD = json.dumps({"token_ids": {"shape": [3]}}).encode()
ANSWERS = {
    "packed": len(PACKED_HEAD).to_bytes(8, "little") + PACKED_HEAD + bytes(12),
    "json": b'{"usage": {"num_generated_tokens": 3}}',
    "completions": b'{"usage": {"completion_tokens": 3}}',
    "completions stream": b'data: {"choices": [{"token_ids": [1, 2, 3]}]}\n\ndata: [DONE]\n\n',
}


def chunked(parts: Sequence[bytes]) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body


def with_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def exchange(answer: bytes, piece_bytes: int) -> list[tuple[float, bytes]]:
    """Pieces of an answer that arrives in parts of this length, twice on one connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"end")
            for start in range(0, len(answer), piece_bytes):
                await asyncio.sleep(0.0001)
                writer.write(answer[start : start + piece_bytes])
        await reader.read()
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        _, client = await asyncio.get_running_loop().create_connection(Exchange, *address)
        await client.ask(b"end")
        pieces = await client.ask(b"end")
        client.close()
        await ended.wait()
    return pieces


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
@pytest.mark.parametrize("name", ANSWERS)
async def test_tokens_of_an_answer_are_counted_however_it_arrives(
    name: str, piece_bytes: int
) -> None:
    body = ANSWERS[name]
    for answer in (with_length(body), chunked([body[:5], body[5:]])):
        pieces = await exchange(answer, piece_bytes)
        assert b"".join(data for _, data in pieces) == answer
        assert result(ROUTES[name], LOAD, 1.0, [pieces])["num_bytes"] == len(answer)


def test_gaps_are_those_between_the_deliveries_of_tokens() -> None:
    whole = chunked(STREAM)
    at = [whole.index(part) for part in STREAM]
    bounds = [0, *at[1:], len(whole)]
    pieces = [
        (time, whole[start:end])
        for time, start, end in zip((0.0, 1.0, 3.0, 3.5), bounds[:-1], bounds[1:], strict=True)
    ]
    assert result(ROUTES["stream"], LOAD, 1.0, [pieces])["p99_gap_seconds"] == 2.0
    with pytest.raises(AssertionError, match="3 tokens instead of 4"):
        result(ROUTES["stream"], replace(LOAD, max_tokens=4), 1.0, [pieces])


def test_requests_of_all_routes_ask_for_the_same_samples() -> None:
    load = Load(num_groups=2, group_size=4, logprobs=20)
    bodies = {
        name: json.loads(requests_of(route, load, "m")[0].partition(b"\r\n\r\n")[2])
        for name, route in ROUTES.items()
    }
    for body in bodies.values():
        group = body["groups"][0] if "groups" in body else body
        sampling = body.get("sampling") or body.get("sampling_params") or body
        assert (group.get("n") or sampling["n"]) == 4
        assert (body.get("top_logprobs") or sampling["logprobs"]) == 20
        assert (sampling["max_tokens"], sampling["ignore_eos"]) == (load.max_tokens, True)


def measured_arm(name: str, rate: float, microseconds: float, gap: float) -> Arm:
    run = Measurement(
        tokens_per_second=rate,
        core_us=microseconds,
        service_us=microseconds,
        bytes_per_token=8.0,
        p99_gap_ms=gap,
    )
    names = {cell.load.name for cell in host_path.NULL_CELLS}
    unused = cast(Any, None)
    measured = {load: [run, run, run] for load in names}
    return Arm(name=name, job={}, client=unused, server=unused, measured=measured)


def test_record_compares_the_arms_with_the_goals() -> None:
    arms = {name: measured_arm(name, 100.0, 14.0, 10.0) for name in host_path.ALL}
    arms[PACKED] = measured_arm(PACKED, 300.0, 14.0, 10.0)
    part = host_path.Part(name="null executor", cells=host_path.NULL_CELLS, arms=arms)
    rows = {row.what: row for row in host_path.record([part]).rows}
    row = rows["256 x 1, logprobs: tokens/s, ours, packed / vllm serve, completions"]
    assert (row.value, row.verdict) == ("3.00 [3.00, 3.00]", "met")
    assert rows["256 x 1, logprobs: EngineCore, us per token, ours, packed"].verdict == "met"
    assert rows["256 x 1, logprobs: service, us per token, ours, packed"].verdict == "missed"
    assert rows["null executor, 512 x 1, logprobs: AsyncLLM alone"].value == (
        "100 tokens/s; EngineCore 14.0, service 14.0 us per token; 8 bytes"
    )
