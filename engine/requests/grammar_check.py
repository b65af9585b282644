"""Validation of structured-output grammars in a subprocess with a CPU time limit.

vLLM validates them on the event loop and compiles them in EngineCore, both without a limit. A
grammar that passes here has been compiled, and a random text was sampled with it, within the limit.
So was a text of the tokens that the request's `logit_bias` and `allowed_token_ids` select.
"""

import asyncio
import hashlib
import itertools
import json
import math
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from engine.errors import ChecksUnavailable, SamplingRefused
from engine.fair_limiter import FairLimiter
from engine.requests.grammar_worker import TOO_SLOW, Answer
from engine.types.samples import Sampling, StructuredOutputs

LIMIT_SECONDS: Final = 10.0
START_SECONDS: Final = 120.0
"""The process imports torch, which may take long on a busy machine."""
NUM_CHECKS: Final = 2
"""Number of checks that run at a time, of different keys."""
CLIENT_BYTES: Final = 4 * 2**20
TOTAL_BYTES: Final = 16 * 2**20
MAX_RESULTS: Final = 4096
REFUSAL_SECONDS: Final = 600.0
"""A refusal is remembered for this time only: a busy machine may have caused it."""
CHECK_BYTES: Final = 1024
"""Size of a waiting check, in addition to its text."""
FIELD: Final = "structured_outputs"
NOT_RUNNING: Final = "the process that checks structured outputs did not start or has ended"
LINE_BYTES: Final = 2**24


class GrammarChecker:
    """Checks structured outputs in a process that is started at the first check.

    Clients take turns, and a result that is remembered needs no turn. A check that has begun
    continues if its caller is cancelled, and its result is remembered for the next one.
    `tokenizer_info` returns the tokenizer as xgrammar's JSON.
    """

    def __init__(
        self,
        tokenizer_info: Callable[[], str],
        *,
        limit_seconds: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer_info = tokenizer_info
        self._limit_seconds = limit_seconds
        self._worker: Worker | None = None
        self._starting = asyncio.Lock()
        self.limiter = FairLimiter(
            "structured outputs",
            NUM_CHECKS,
            key_bytes=CLIENT_BYTES,
            total_bytes=TOTAL_BYTES,
            clock=clock,
        )
        self._results = Results(clock)
        self._checking: dict[bytes, asyncio.Task[Answer]] = {}

    async def check(self, sampling: Sampling, client: str = "") -> None:
        """Raise SamplingRefused if the constraint is invalid or too complex.

        Raises ChecksUnavailable if the process does not start, and QueueFull if too many checks
        wait.
        """
        assert sampling.structured_outputs is not None, "there is a constraint to check"
        reason = await self._reason(sampling, sampling.structured_outputs, client)
        if reason is not None:
            raise SamplingRefused(FIELD, reason)

    def refuse(self, outputs: StructuredOutputs) -> None:
        """Refuse a constraint for a while that has taken too long in the engine."""
        self._results.add(_digest_of_outputs(outputs), TOO_SLOW)

    async def _reason(
        self, sampling: Sampling, outputs: StructuredOutputs, client: str
    ) -> str | None:
        if (overrun := _digest_of_outputs(outputs)) in self._results:
            return self._results.get(overrun)
        kind, text = await asyncio.to_thread(xgrammar_source, outputs)
        line = json.dumps([kind, text, _forced(sampling)])
        name = hashlib.sha256(line.encode()).digest()
        if name in self._results:
            return self._results.get(name)
        worker = await self._started()
        size = CHECK_BYTES + len(text)
        checked = partial(self._checked, worker, client, name, line)
        return await self.limiter.run(client, size, checked)

    async def _checked(self, worker: "Worker", client: str, name: bytes, line: str) -> str | None:
        if name in self._results:  # since the check began to wait
            return self._results.get(name)
        if name not in self._checking:
            self._checking[name] = asyncio.create_task(self._compute(worker, name, line))
        answer = await self._checking[name]
        self.limiter.record(client, answer.cpu_seconds)
        return answer.reason

    async def _compute(self, worker: "Worker", name: bytes, line: str) -> Answer:
        try:
            answer = await worker.ask(self._limit_seconds, line)
            self._results.add(name, answer.reason)
            return answer
        finally:
            del self._checking[name]

    async def _started(self) -> "Worker":
        async with self._starting:
            if self._worker is None or self._worker.has_ended:
                await self.close()
                self._worker = await self._new_worker()
            return self._worker

    async def _new_worker(self) -> "Worker":
        return await Worker.start(await asyncio.to_thread(self._tokenizer_info))

    async def close(self) -> None:
        """Kill the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()


class Worker:
    """The process that checks grammars, several at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, tokenizer_info: str) -> "Worker":
        """Raises ChecksUnavailable if the process does not start."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine.requests.grammar_worker"),
            stdin=PIPE,
            stdout=PIPE,
            limit=LINE_BYTES,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await _send(process, tokenizer_info)
                assert process.stdout is not None
                json.loads(await process.stdout.readline())
        except BaseException as error:
            process.kill()
            await process.wait()
            if not isinstance(error, TimeoutError | OSError | ValueError):
                raise
            raise ChecksUnavailable(NOT_RUNNING) from error
        return cls(process)

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    async def ask(self, limit_seconds: float, line: str) -> Answer:
        """The answer for a grammar. Raises ChecksUnavailable if the process ends."""
        number = next(self._numbers)
        found: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = found
        try:
            if not self.has_ended:
                await _send(self._process, f"[{number}, {limit_seconds}, {line[1:]}")
                return await found
        except OSError:
            pass
        finally:
            self._waiting.pop(number, None)
        raise ChecksUnavailable(NOT_RUNNING)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                number, *answer = json.loads(line)
                if not self._waiting[number].done():
                    self._waiting[number].set_result(Answer(*answer))
        finally:
            for found in self._waiting.values():
                if not found.done():
                    found.set_exception(ChecksUnavailable(NOT_RUNNING))

    async def close(self) -> None:
        """End the process, which kills its children."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading


class Results:
    """The latest results of checks by digest: None, or why a constraint is refused."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()

    def add(self, name: bytes, reason: str | None) -> None:
        seconds = math.inf if reason is None else REFUSAL_SECONDS
        self._found[name] = (reason, self._clock() + seconds)
        while len(self._found) > MAX_RESULTS:
            self._found.popitem(last=False)

    def __contains__(self, name: bytes) -> bool:
        if name in self._found and self._found[name][1] <= self._clock():
            del self._found[name]
        return name in self._found

    def get(self, name: bytes) -> str | None:
        self._found.move_to_end(name)
        return self._found[name][0]


def _digest_of_outputs(outputs: StructuredOutputs) -> bytes:
    return hashlib.sha256(repr(outputs).encode("utf-8", "surrogatepass")).digest()


def _forced(sampling: Sampling) -> tuple[dict[int, float], list[int] | None]:
    """Parameters that select tokens, as the worker's `Forced`."""
    allowed = sampling.allowed_token_ids
    return dict(sampling.logit_bias), None if allowed is None else list(allowed)


async def _send(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()


def xgrammar_source(outputs: StructuredOutputs) -> tuple[str, str]:
    """Kind and text of a constraint, as vLLM's backend passes it to xgrammar's compiler."""
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    if outputs.json is not None:
        return "json_schema", _checked_schema(outputs.json)
    if outputs.json_object:
        return "json_schema", '{"type": "object"}'
    if outputs.regex is not None:
        if "\x00" in outputs.regex:
            raise SamplingRefused(FIELD, "a regex must not contain NUL")
        return "regex", outputs.regex
    if outputs.choice is not None:
        return "grammar", choice_as_grammar(list(outputs.choice))
    if outputs.grammar is not None:
        return ("lark" if grammar_is_likely_lark(outputs.grammar) else "grammar"), outputs.grammar
    assert outputs.structural_tag is not None, "exactly one kind is given"
    return "structural_tag", _checked_tag(outputs.structural_tag)


def _checked_schema(text: str) -> str:
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    schema = _parsed(text, structural_tag=False)
    if not isinstance(schema, dict | bool):
        raise SamplingRefused(FIELD, "a JSON schema must be an object")
    if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
        raise SamplingRefused(
            FIELD, "the JSON schema uses a keyword that xgrammar does not support"
        )
    return text


def _checked_tag(text: str) -> str:
    tag = _parsed(text, structural_tag=True)
    if not isinstance(tag, dict) or "structures" in tag:
        raise SamplingRefused(FIELD, "structural_tag must be a structural tag of xgrammar")
    return text


def _parsed(text: str, *, structural_tag: bool) -> Any:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import check_json_nesting

    try:
        check_json_nesting(text, structural_tag=structural_tag)
        return json.loads(text)
    except VLLMValidationError as error:
        raise SamplingRefused(FIELD, str(error.args[0])) from error
    except (ValueError, RecursionError) as error:
        raise SamplingRefused(FIELD, "not valid JSON") from error
