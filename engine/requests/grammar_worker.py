"""Subprocess that test-compiles grammars: `python -m engine.requests.grammar_worker`.

Compiling a grammar, or sampling with it, can take minutes, and cannot be interrupted. Here each is
done in a child process of its own, which the kernel ends at a limit of CPU time or memory. The
first line of stdin is xgrammar's TokenizerInfo as JSON; each further line is a `Task`. Each line of
stdout is the number of a task, followed by its `Answer`.
"""

import json
import math
import os
import random
import resource
import signal
import sys
import time
from contextlib import suppress
from itertools import repeat
from typing import Any, Final, NamedTuple

NUM_STEPS: Final = 512
STEP_CPU_SECONDS: Final = 0.03
"""Limit of the CPU time per token. EngineCore spends this time in the step of all requests."""
COMPILE_CPU_SECONDS: Final = 2.0
"""Limit of the CPU time of a compilation. EngineCore compiles again, for one request at a time."""
NUM_TRIES: Final = 64
"""Tries to find a random token that may be chosen."""
CHILD_BYTES: Final = 2**31
"""Memory that a check may use in addition to that of this process."""
NICE: Final = 5
TOO_SLOW: Final = "sampling with it takes too long: make it less ambiguous or smaller"
SLOW_TO_COMPILE: Final = "compiling it takes too long: make it simpler"
TOO_LARGE: Final = "it cannot be compiled: make it simpler"


class Forced(NamedTuple):
    """Parameters of a request that select tokens: `logit_bias` and `allowed_token_ids`."""

    bias: dict[str, float]
    allowed: list[int] | None


class Task(NamedTuple):
    number: int
    cpu_seconds: float
    kind: str
    grammar: str
    forced: Forced


class Answer(NamedTuple):
    """Why a grammar cannot be used, or None, and the CPU time that the check took."""

    reason: str | None
    cpu_seconds: float


class Checker:
    """Compiles a grammar for one tokenizer, and samples texts with it."""

    def __init__(self, tokenizer_info: Any) -> None:
        import xgrammar

        self._xgrammar: Any = xgrammar
        self._info = tokenizer_info
        self._compiler: Any = xgrammar.GrammarCompiler(self._info, max_threads=1)

    def check(self, kind: str, grammar: str, forced: Forced) -> str | None:
        began_at = time.process_time()
        try:
            compiled = getattr(self._compiler, f"compile_{kind}")(grammar)
        except Exception as error:  # xgrammar raises RuntimeError with the reason
            return str(error).rsplit("] ", 1)[-1][:500]
        if time.process_time() - began_at > COMPILE_CPU_SECONDS:
            return SLOW_TO_COMPILE
        texts = [Forced({}, None), forced] if forced.bias or forced.allowed else [forced]
        is_slow = any(self._is_slow(compiled, TokenChoice(self._info, text)) for text in texts)
        return TOO_SLOW if is_slow else None

    def _is_slow(self, compiled: Any, choice: "TokenChoice") -> bool:
        """Sample a text; returns True if a token takes too long."""
        matcher = self._xgrammar.GrammarMatcher(compiled)
        bitmask = self._xgrammar.allocate_token_bitmask(1, self._info.vocab_size)
        for _ in range(NUM_STEPS):
            began_at = time.thread_time()
            matcher.fill_next_token_bitmask(bitmask)
            filled_at = time.thread_time()
            token = choice.choose(bitmask[0].tolist())
            chosen_at = time.thread_time()
            if token is None or not matcher.accept_token(token):
                return False
            seconds = time.thread_time() - chosen_at + filled_at - began_at
            if seconds > STEP_CPU_SECONDS:
                return True
        return False


class TokenChoice:
    """Random tokens of bitmasks of 32-bit words, or those with the highest bias.

    Stop tokens and tokens that are not allowed are never chosen.
    """

    def __init__(self, info: Any, forced: Forced) -> None:
        self._random = random.Random(0)
        self._vocab_size: int = info.vocab_size
        unlikely = {int(token) for token, bias in forced.bias.items() if bias < 0}
        self._excluded = {*info.stop_token_ids, *unlikely}
        biased = sorted(forced.bias, key=lambda token: -forced.bias[token])
        self._preferred = [int(token) for token in biased if forced.bias[token] > 0]
        self._allowed = None if forced.allowed is None else set(forced.allowed)

    def choose(self, words: list[int]) -> int | None:
        if self._allowed is not None:
            words = self._among_allowed(words)
        for token in self._preferred:
            if _has(words, token) and token not in self._excluded:
                return token
        used = [index for index, word in enumerate(words) if word]
        for _ in repeat(None, NUM_TRIES if used else 0):
            index = self._random.choice(used)
            bits = [bit for bit in range(32) if words[index] >> bit & 1]
            token = 32 * index + self._random.choice(bits)
            if token < self._vocab_size and token not in self._excluded:
                return token
        return None

    def _among_allowed(self, words: list[int]) -> list[int]:
        found = [0] * len(words)
        for token in self._allowed or ():
            if _has(words, token):
                found[token // 32] |= 1 << token % 32
        return found


def _has(words: list[int], token: int) -> bool:
    return token < 32 * len(words) and bool(words[token // 32] >> token % 32 & 1)


class Children:
    """Child processes, one per task. The handler of SIGCHLD answers for those that were ended."""

    def __init__(self, tokenizer_info: Any) -> None:
        self._info = tokenizer_info
        self._tasks: dict[int, Task] = {}
        signal.signal(signal.SIGCHLD, self._on_ended)

    def start(self, task: Task) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._run(task)
        self._tasks[pid] = task
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _run(self, task: Task) -> None:
        status = 1
        try:
            _limit(task.cpu_seconds)
            reason = Checker(self._info).check(task.kind, task.grammar, task.forced)
            _send(task.number, Answer(reason, time.process_time()))
            status = 0
        finally:
            os._exit(status)

    def _on_ended(self, *_: object) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if not pid:
                    return
                task = self._tasks.pop(pid)
                if status:
                    seconds = usage.ru_utime + usage.ru_stime
                    _send(task.number, Answer(_reason(task, status, seconds), seconds))

    def kill(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        for pid in self._tasks:
            os.kill(pid, signal.SIGKILL)


def _reason(task: Task, status: int, seconds: float) -> str:
    """Why a child ended with this wait status, which had used this CPU time.

    The timer that ends it may count a little more than the time of its usage.
    """
    was_timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    if seconds < task.cpu_seconds and not was_timed_out:
        return TOO_LARGE
    return f"compiling it takes longer than {task.cpu_seconds:g} s of CPU time: make it simpler"


def _limit(cpu_seconds: float) -> None:
    """Limit the CPU time and the memory of this process, which yields to the engine."""
    os.nice(NICE)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    seconds = math.ceil(cpu_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        num_pages = int(file.read().split()[0])
    limit = num_pages * resource.getpagesize() + CHILD_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(number: int, answer: Answer) -> None:
    """One write, as several processes write to the same pipe."""
    os.write(1, json.dumps([number, *answer]).encode() + b"\n")


def main() -> None:
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    children = Children(info)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        number, cpu_seconds, kind, grammar, (bias, allowed) = json.loads(line)
        children.start(Task(number, cpu_seconds, kind, grammar, Forced(bias, allowed)))
    children.kill()


if __name__ == "__main__":
    main()
