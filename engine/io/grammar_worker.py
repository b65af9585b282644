"""Process that compiles grammars and tries them: `python -m engine.io.grammar_worker`.

Compiling a grammar, or sampling with it, can take minutes, and cannot be interrupted. Here it
happens in a process that its parent may kill. The first line of stdin is xgrammar's TokenizerInfo
as JSON; each further line is a grammar. Each line of stdout answers one grammar: null, or why it
cannot be used.
"""

import json
import random
import sys
import time
from typing import Any

NUM_STEPS = 512
STEP_CPU_SECONDS = 0.03
"""Limit of the CPU time per token. EngineCore spends this time in the step of all requests."""


class Checker:
    """Compiles grammars for one tokenizer, and samples a random text with each."""

    def __init__(self, tokenizer_info: str) -> None:
        import xgrammar

        self._xgrammar: Any = xgrammar
        self._info = xgrammar.TokenizerInfo.deserialize_json(tokenizer_info)
        self._compiler: Any = xgrammar.GrammarCompiler(self._info, max_threads=2)

    def check(self, kind: str, grammar: str) -> str | None:
        try:
            compiled = self._compile(kind, grammar)
        except Exception as error:  # xgrammar raises RuntimeError with the reason
            return str(error).rsplit("] ", 1)[-1][:500]
        return self._try_out(compiled)

    def _compile(self, kind: str, grammar: str) -> Any:
        return getattr(self._compiler, f"compile_{kind}")(grammar)

    def _try_out(self, compiled: Any) -> str | None:
        """Sample a random text; returns a message if a token takes too long."""
        matcher = self._xgrammar.GrammarMatcher(compiled)
        bitmask = self._xgrammar.allocate_token_bitmask(1, self._info.vocab_size)
        choose, stops = random.Random(0), set(self._info.stop_token_ids)
        for _ in range(NUM_STEPS):
            began_at = time.thread_time()
            matcher.fill_next_token_bitmask(bitmask)
            token = choose_token(bitmask[0].tolist(), choose, stops)
            if token is None or not matcher.accept_token(token):
                return None
            if time.thread_time() - began_at > STEP_CPU_SECONDS:
                return "sampling with it takes too long: make it less ambiguous or smaller"
        return None


def choose_token(words: list[int], choose: random.Random, stops: set[int]) -> int | None:
    """Random token of a bitmask of 32-bit words, except for stop tokens, or None."""
    used = [index for index, word in enumerate(words) if word]
    for _ in range(64):
        if not used:
            return None
        index = choose.choice(used)
        bits = [bit for bit in range(32) if words[index] >> bit & 1]
        token = 32 * index + choose.choice(bits)
        if token not in stops:
            return token
    return None


def main() -> None:
    checker = Checker(sys.stdin.readline())
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(checker.check(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
