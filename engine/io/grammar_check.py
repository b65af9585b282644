"""Validation of structured outputs in a separate process, with a time limit.

vLLM validates them on the event loop and compiles them in EngineCore, both without a limit. A
grammar that passes here has been compiled, and a random text was sampled with it, within the limit.
"""

import asyncio
import hashlib
import json
import math
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from engine.errors import ChecksUnavailable, SamplingRefused
from engine.io.fair_turns import FairTurns, TurnLimits
from engine.types import StructuredOutputs

LIMIT_SECONDS: Final = 10.0
START_SECONDS: Final = 120.0
"""The process imports torch, which may take long on a busy machine."""
MAX_RESULTS: Final = 4096
REFUSAL_SECONDS: Final = 600.0
"""A refusal is remembered for this time only: a busy machine may have caused it."""
WAITING: Final = TurnLimits(client_bytes=4 * 2**20, total_bytes=16 * 2**20)
CHECK_BYTES: Final = 1024
"""Size of a waiting check, in addition to its text."""
FIELD: Final = "structured_outputs"
LINE_BYTES: Final = 2**24


class GrammarChecker:
    """Checks structured outputs, one at a time. The process starts at the first check.

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
        self._process: Process | None = None
        self._turns = FairTurns(WAITING)
        self._results = Results(clock)
        self._checking: asyncio.Task[str | None] | None = None

    async def check(self, outputs: StructuredOutputs, client: str = "") -> None:
        """Raise SamplingRefused if the constraint is invalid or too complex.

        Raises ChecksUnavailable if the process does not start, and ChecksQueueFull if too many
        checks wait.
        """
        kind, text = await asyncio.to_thread(xgrammar_source, outputs)
        name = _digest(kind, text)
        if name not in self._results:
            await self._turns.acquire(client, CHECK_BYTES + len(text))
            reason = await self._in_turn(name, kind, text)
        else:
            reason = self._results.get(name)
        if reason is not None:
            raise SamplingRefused(FIELD, reason)

    async def _in_turn(self, name: bytes, kind: str, text: str) -> str | None:
        """Result of a check, which may have been added while its turn was awaited."""
        if name in self._results:
            self._turns.release()
            return self._results.get(name)
        self._checking = asyncio.create_task(self._compute(name, kind, text))
        self._checking.add_done_callback(lambda _: self._turns.release())
        return await asyncio.shield(self._checking)

    async def _compute(self, name: bytes, kind: str, text: str) -> str | None:
        process = await self._started()
        reason: str | None
        try:
            async with asyncio.timeout(self._limit_seconds):
                reason = await _exchange(process, json.dumps([kind, text]))
        except TimeoutError:
            await self.close()
            reason = f"compiling it takes longer than {self._limit_seconds:g} s: make it simpler"
        except (OSError, ValueError):  # the process has ended, for lack of memory or by a crash
            await self.close()
            reason = "it cannot be compiled: make it simpler"
        except BaseException:
            await self.close()  # its answer must not be taken for that of the next grammar
            raise
        self._results.add(name, reason)
        return reason

    async def _started(self) -> Process:
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._running()
        except (TimeoutError, OSError, ValueError) as error:
            await self.close()
            raise ChecksUnavailable(
                "the process that checks structured outputs did not start"
            ) from error
        except BaseException:
            await self.close()
            raise

    async def _running(self) -> Process:
        if self._process is None:
            info = await asyncio.to_thread(self._tokenizer_info)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "engine.io.grammar_worker"),
                stdin=PIPE,
                stdout=PIPE,
                limit=LINE_BYTES,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            await _exchange(self._process, info)
        return self._process

    async def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


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


def _digest(kind: str, text: str) -> bytes:
    return hashlib.sha256(f"{kind}\n{text}".encode("utf-8", "surrogatepass")).digest()


async def _exchange(process: Process, line: str) -> Any:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()
    return json.loads(await process.stdout.readline())


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
