"""Scripts of agents, and the rows that the benchmark of sessions makes of its counts."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.harness.conversations import SCRIPTS, Message
from bench.harness.paired_runs import alternate
from bench.harness.session_agents import Bench, Pauses, Routes, has_content
from bench.harness.session_trees import num_forwarded_tokens, num_sampled_of_longest
from bench.sessions import Counts, Results, record
from coppice import AsyncRollouts, Group, Segment, Tree
from tests.fake_engine import FakeEngine
from tests.service.sessions.agents import training


def played(script: str, key: str = "a") -> list[list[Message]]:
    """Conversations that a script sends to the policy."""
    sent: list[list[Message]] = []

    async def ask(messages: list[Message]) -> str:
        sent.append(messages)
        return "12"

    asyncio.run(SCRIPTS[script](ask, key))
    return sent


def num_continued(script: str) -> int:
    """Number of turns whose conversation continues that of the turn before."""
    sent = played(script)
    return sum(now[: len(before)] == before for before, now in zip(sent, sent[1:], strict=False))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_repeat_and_keys_make_them_differ(script: str) -> None:
    assert played(script) == played(script)
    assert played(script)[0] != played(script, "b")[0]


@pytest.mark.parametrize(
    ("script", "num_turns", "continued"),
    [("linear", 8, 7), ("branches", 11, 8), ("compaction", 10, 8), ("sub-agents", 13, 6)],
)
def test_scripts_branch_where_their_names_say(script: str, num_turns: int, continued: int) -> None:
    assert len(played(script)) == num_turns
    assert num_continued(script) == continued


def segment(name: str, parent: str | None, num_tokens: int, *, sampled: bool = True) -> Segment:
    return Segment(
        id=name,
        parent=parent,
        depth=0,
        token_ids=np.arange(num_tokens),
        logprobs=np.zeros(num_tokens if sampled else 0, dtype=np.float32),
        entropy=None,
        finish_reason="stop" if sampled else "cut",
        num_leaves=1,
        versions=(),
        sampled=sampled,
    )


def branched_group() -> Group:
    """A prompt of 5 tokens and two branches, of which the one with more context is longer."""
    parts = (
        segment("a", None, 4),
        segment("b", "a", 10, sampled=False),
        segment("c", "b", 3),
        segment("d", "a", 2, sampled=False),
        segment("e", "d", 6),
    )
    return Group(
        id="g",
        index=0,
        outcome="done",
        exact=True,
        num_prompt_tokens=5,
        num_cached_tokens=0,
        samples=(),
        tree=Tree(segments=parts, leaves=("c", "e")),
        prompt_token_ids=np.arange(5),
    )


def test_every_token_of_a_tree_is_counted_once() -> None:
    # The last token of a leaf has no successor, so it need not be forwarded.
    assert 28 <= num_forwarded_tokens(branched_group()) <= 30


def test_longest_trajectory_keeps_only_its_own_samples() -> None:
    assert num_sampled_of_longest(branched_group()) == 7


def test_only_chunks_with_text_are_first_tokens() -> None:
    assert has_content('data: {"choices": [{"delta": {"content": "1"}}]}')
    assert not has_content('data: {"choices": [{"delta": {"role": "assistant"}}]}')
    assert not has_content("data: [DONE]")


def test_goals_have_verdicts() -> None:
    pauses, routes = Pauses.__new__(Pauses), Routes.__new__(Routes)
    pauses.kept, pauses.retained, pauses.evicted = [0.1, 0.1], [0.1, 0.2], [0.2, 0.6]
    pauses.retaining_throughput, pauses.plain_throughput = [99.0, 99.0], [100.0, 100.0]
    routes.sessions, routes.chat = [95.0, 95.0], [100.0, 100.0]
    counts = Counts(prefilled=10, rows=400, unique=100, forwarded=110, sampled=50, longest=20)
    every = dict.fromkeys(SCRIPTS, counts)
    rows = {row.what: row for row in record(Results(every, every, pauses, routes)).rows}
    assert rows["throughput, sessions / chat route"].verdict == "missed"
    assert rows["linear: tokens forwarded by the trainer / unique tokens"].verdict == "missed"
    assert rows["linear: sampled tokens lost by the longest trajectory only"].value == "60.0%"
    assert rows["TTFT after a tool pause, KV evicted / kept"].value.startswith("4.000")
    assert rows["TTFT after a tool pause, KV evicted / retained"].value.startswith("2.500")
    pause = rows["TTFT after a tool pause"].value
    assert pause == "kept 100, retained 150, evicted 400 ms"
    assert rows["throughput of other callers, retention / none"].verdict == "met"


class Digits(FakeEngine):
    """Samples digits only, as the benchmark's agents request."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "1" * len(token_ids)


async def test_paused_agents_are_timed_under_other_traffic(tmp_path: Path) -> None:
    engine = Digits(max_context_tokens=4096)
    async with training(tmp_path, engine) as trainer, AsyncRollouts(trainer.served.url) as rollouts:
        url = trainer.served.url
        bench = Bench(model="fake", http=trainer.http, url=url, rollouts=rollouts)
        pauses = Pauses(bench, bench)
        await pauses.start()
        await alternate(
            [pauses.after_kept, pauses.after_retention, pauses.after_eviction], rounds=1, warm_up=0
        )
    measured = (pauses.kept, pauses.retained, pauses.evicted)
    assert all(len(values) == 1 and values[0] > 0 for values in measured)
    others = [sample for sample in engine.submitted if sample.session_id is None]
    num_tokens = sum(len(sample.prompt_token_ids) for sample in others)
    assert num_tokens >= 2 * 1.25 * engine.info.num_blocks * engine.info.block_size
