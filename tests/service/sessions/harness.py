"""A session for an agent under test, and the comparison of its trees with the engine's samples."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.service.sessions.agents import Agent, Trainer, training
from tests.service.sessions.scripted_engine import Sampled, Script, ScriptedEngine
from tests.service.sessions.template_families import FamilyEngine

ASKED = "Compute (2 + 3) + (4 + 5)."
Sample = tuple[list[int], list[int], list[float]]
"""Tokens of the prompt, tokens of the sample, and their logprobs."""


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def added(a: int, b: int) -> str:
    """A tool call with white space that JSON writers do not write."""
    return called("add", f'{{"b":{b},   "a": {a}}}')


def thought(text: str) -> str:
    """A text after empty reasoning."""
    return f"<think>\n\n</think>\n\n{text}"


TEXTS = (
    f"<think>\nTwo sums, at once.\n</think>\n\nI begin.\n{added(2, 3)}\n{added(4, 5)}",
    f"<think>\nThe last one.\n</think>\n\n{added(5, 9)}",
    "<think>\nDone.\n</think>\n\nIt is 14.",
)


def by_results(prompt: str) -> str:
    """The text that follows the results of tools in the prompt, which must be right."""
    results = tuple(re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL))
    return {(): TEXTS[0], ("5", "9"): TEXTS[1], ("5", "9", "14"): TEXTS[2]}[results]


@dataclass(frozen=True)
class Harness:
    """A session of the agent under test, and all calls of the engine, which it records."""

    trainer: Trainer
    agent: Agent
    sampled: Sequence[Sampled]

    async def check(self, num_calls: int = len(TEXTS)) -> None:
        """All samples are on one path, with the tokens and logprobs that the engine returned."""
        answer = await self.check_samples(["new_conversation"] + ["extended"] * (num_calls - 1))
        [group] = answer["groups"]
        assert len(group["leaves"]) == 1
        path = [token for part in group["segments"] for token in part["token_ids"]]
        last = self.own_sampled()[-1]
        assert group["prompt_token_ids"] + path == last.prompt + last.token_ids

    async def check_samples(self, reasons: Sequence[str]) -> dict[str, Any]:
        """All samples are in the trees once, after their prompts; returns the session's answer.

        `reasons` are those of the turns, which end in another order if they run in parallel.
        """
        answer = await self.trainer.finish(self.agent, reward=1.0)
        assert sorted(turn["reason"] for turn in answer["turns"]) == sorted(reasons)
        found, sampled = sorted(samples(answer)), sorted(map(_as_sample, self.own_sampled()))
        assert [each[:2] for each in found] == [each[:2] for each in sampled]
        for one, other in zip(found, sampled, strict=True):
            assert one[2] == pytest.approx(other[2])
        assert answer["usage"]["num_sampled_tokens"] == sum(len(each[1]) for each in sampled)
        return answer

    def own_sampled(self) -> list[Sampled]:
        return [each for each in self.sampled if each.session == self.agent.id]


def samples(answer: dict[str, Any]) -> list[Sample]:
    """The samples of a session's turns, as its trees have them."""
    paths: dict[str, tuple[list[int], list[float | None]]] = {}
    for group in answer["groups"]:
        root = group["prompt_token_ids"]
        paths[group["id"]] = (root, [None] * len(root))
        for part in group["segments"]:
            tokens, logprobs = paths[part.get("parent") or group["id"]]
            own = part["logprobs"] if part.get("sampled", True) else [None] * len(part["token_ids"])
            paths[part["id"]] = (tokens + part["token_ids"], logprobs + own)
    return [_sample(*paths[turn["segment"]], turn["num_prompt_tokens"]) for turn in answer["turns"]]


def _sample(tokens: list[int], logprobs: list[float | None], num_prompt_tokens: int) -> Sample:
    """A sample, whose segments are those after its prompt."""
    own = [each for each in logprobs[num_prompt_tokens:] if each is not None]
    assert len(own) == len(tokens) - num_prompt_tokens, "all tokens of the sample are sampled"
    return tokens[:num_prompt_tokens], tokens[num_prompt_tokens:], own


def _as_sample(sampled: Sampled) -> Sample:
    return sampled.prompt, sampled.token_ids, sampled.logprobs


@asynccontextmanager
async def harnesses(
    tmp_path: Path,
    family: FamilyEngine,
    script: Script = TEXTS,
    *,
    n: int = 1,
    **options: Any,
) -> AsyncIterator[list[Harness]]:
    """A server with `n` sessions."""
    engine = ScriptedEngine(family, script)
    async with training(tmp_path, engine) as trainer:
        agents = await trainer.create(n=n, **{"sampling": {"max_tokens": 200}, **options})
        yield [Harness(trainer, agent, engine.sampled) for agent in agents]


@asynccontextmanager
async def harness(
    tmp_path: Path, family: FamilyEngine, script: Script = TEXTS, **options: Any
) -> AsyncIterator[Harness]:
    async with harnesses(tmp_path, family, script, **options) as [found]:
        yield found
