"""Grammars that are slow only after certain tokens, on the real engine: others are served."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engine.vllm_engine import VllmEngine
from tests.engine.seedling import settings
from tests.serving import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = {"text": "Compute 12+34.\n"}
AMBIGUOUS = 'root ::= [^a] | "a" s\ns ::= s s | "a" | ""'


def nullable_rules(seed: int) -> str:
    """Each rule is two others, or empty, in many ways: after `aa` a mask takes minutes."""
    choice, rules = random.Random(seed), range(30)
    lines = ['root ::= [^a] | "a" r0 r0']
    for rule in rules:
        pairs = [f"r{choice.choice(rules)} r{choice.choice(rules)}" for _ in range(6)]
        lines.append(f'r{rule} ::= {" | ".join(pairs)} | "a" | ""')
    return "\n".join(lines)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(VllmEngine(settings()), tmp_path_factory.mktemp("served")) as served:
        yield served


def token_of(served: Served, text: str) -> int:
    engine: Any = served.server.engine
    [token] = engine.llm.get_tokenizer().encode(text)
    return int(token)


async def attack(served: Served, grammar: str, n: int, *, is_hidden: bool) -> Any:
    """Force `a`, and if hidden, so that the check follows another token, which is a bad word."""
    bias = {str(token_of(served, "a")): 50.0}
    if is_hidden:
        bias[str(token_of(served, "b"))] = 100.0
    sampling = {
        "structured_outputs": {"grammar": grammar},
        "max_tokens": 50,
        "temperature": 0,
        "logit_bias": bias,
        "bad_words": ["b"] if is_hidden else [],
    }
    body = {"groups": [{"prompt": PROMPT, "n": n}], "sampling": sampling}
    return await served.http.post("/v1/rollouts", json=body, timeout=300)


async def serve_others(served: Served, attacks: "asyncio.Future[Any]") -> int:
    """Number of rollouts of another caller that are served until the attacks have ended."""
    number = 0
    while not attacks.done() or not number:
        body = {"groups": [{"prompt": PROMPT}], "sampling": {"max_tokens": 4}}
        answer = await served.http.post("/v1/rollouts", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.json()["groups"][0]["samples"][0]["finish_reason"] in ("stop", "length")
        number += 1
    return number


@pytest.mark.parametrize(("grammar", "n"), [(nullable_rules(0), 16), (AMBIGUOUS, 256)])
async def test_grammar_that_the_bias_makes_slow_is_refused(
    served: Served, grammar: str, n: int
) -> None:
    refused = asyncio.ensure_future(attack(served, grammar, n, is_hidden=False))
    assert await serve_others(served, refused)
    answer = await refused
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "takes too long" in answer.text


async def test_grammars_that_become_slow_in_the_engine_end_their_samples(served: Served) -> None:
    grammars = [nullable_rules(seed) for seed in range(1, 4)]
    attacks = asyncio.gather(*(attack(served, each, 16, is_hidden=True) for each in grammars))
    assert await serve_others(served, attacks)
    for answer in await attacks:
        assert answer.status_code == 200, answer.text
        [group] = answer.json()["groups"]
        assert {sample["finish_reason"] for sample in group["samples"]} == {"error"}
    again = await attack(served, grammars[0], 16, is_hidden=True)
    assert (again.status_code, again.json()["code"]) == (422, "invalid_request")
    assert served.server.engine.health().stage == "serving"
