"""Drafts of vLLM's Model Runner V2 with as many passes of the draft model as the step needs."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.engine.drafter.draft_runner import (
    BLOCK,
    LONGEST,
    MAX_REQS,
    MAX_TOKENS,
    Verified,
    make_runner,
    without_gpu,
)

pytest.importorskip("triton")
from tests.sample_sizes import num_examples

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, without_gpu(patch):
        yield


def stock_speculator() -> Any:
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    return StandaloneARSpeculator


class Pair:
    """Our speculator beside vLLM's, which drafts the longest length in every step."""

    def __init__(self) -> None:
        self.ours, self.stock = make_runner(), make_runner(stock_speculator())

    def add(self, name: str, tokens: list[int], *, prefix_of: str = "") -> None:
        for runner in (self.ours, self.stock):
            runner.add(name, tokens, prefix_of=prefix_of)

    def step(self, names: list[str], length: int, *more: Verified, prompt_tokens: int = 99) -> None:
        """A step of both; fails unless rows past prefill have the same drafts."""
        ours = self.ours.step(names, length, *more, prompt_tokens=prompt_tokens)
        stock = self.stock.step(names, LONGEST, *more, prompt_tokens=prompt_tokens)
        for name, own, full in zip(names, ours, stock, strict=True):
            row = self.ours.rows[name]
            if row.num_computed == len(row.tokens) - 1:
                assert own == full[:length], name


@pytest.mark.parametrize("length", range(LONGEST + 1))
def test_number_of_passes_is_the_draft_length(length: int) -> None:
    runner = make_runner()
    runner.add("a", PROMPT)
    runner.step(["a"], LONGEST)
    runner.model.passes.clear()
    runner.step(["a"], length, Verified(num_drafts=LONGEST, num_accepted=1))
    assert len(runner.model.passes) == length


def test_vllm_runs_all_passes_in_every_step() -> None:
    runner = make_runner(stock_speculator())
    runner.add("a", PROMPT)
    runner.step(["a"], 0)
    assert len(runner.model.passes) == LONGEST


def test_drafts_are_those_of_vllm_at_the_full_length() -> None:
    pair = Pair()
    pair.add("a", PROMPT)
    pair.add("b", PROMPT[::-1])
    for accepted in (0, 1, 3, 2):
        pair.step(["a", "b"], LONGEST, Verified(num_drafts=LONGEST, num_accepted=accepted))


def test_tokens_of_steps_without_drafts_are_computed_by_the_next_that_drafts() -> None:
    pair = Pair()
    pair.add("a", PROMPT)
    for verified in (Verified(), Verified(), Verified()):
        pair.step(["a"], 0, verified)
    pair.step(["a"], 2)
    assert pair.ours.model.passes == [len(PROMPT) + 4, 1]


def test_rejected_drafts_of_a_step_that_does_not_draft_are_no_gap() -> None:
    pair = Pair()
    pair.add("a", [3])
    pair.step(["a"], LONGEST)
    pair.step(["a"], 0, Verified(num_drafts=LONGEST, num_accepted=0))
    pair.step(["a"], LONGEST)
    pair.step(["a"], LONGEST, Verified(num_drafts=LONGEST, num_accepted=1))


def test_padding_of_missing_tokens_is_written_nowhere() -> None:
    """The rest of a block table has blocks of earlier requests, which others may hold now."""
    runner = make_runner()
    runner.add("a", [3])
    runner.add("b", PROMPT)
    runner.step(["a", "b"], LONGEST)
    runner.step(["a"], 0, Verified(num_drafts=LONGEST, num_accepted=0))
    a, b = runner.rows["a"], runner.rows["b"]
    runner.speculator.block_tables.block_tables[0].gpu[a.state, 1:] = b.blocks[0]
    before = runner.model.cache[b.blocks[0] * BLOCK :][:BLOCK].tolist()
    runner.step(["a"], 1)
    assert runner.model.cache[b.blocks[0] * BLOCK :][:BLOCK].tolist() == before == PROMPT[:BLOCK]


def test_missing_tokens_beyond_the_batch_limit_take_further_passes() -> None:
    pair = Pair()
    pair.add("a", PROMPT * 3)
    for _ in range(2):
        pair.step(["a"], 0, prompt_tokens=MAX_TOKENS)
    pair.add("b", PROMPT)
    pair.step(["a", "b"], 0)
    pair.step(["a", "b"], 2)
    *further, first, second = pair.ours.model.passes
    assert further and max(pair.ours.model.passes) <= MAX_TOKENS + MAX_REQS
    assert (first > 2, second) == (True, 2)


def test_cached_prefix_with_the_drafts_model_kv_is_not_computed_again() -> None:
    pair = Pair()
    pair.add("a", PROMPT)
    pair.step(["a"], LONGEST)
    pair.add("b", [*PROMPT, 8, 8], prefix_of="a")
    pair.ours.model.passes.clear()
    pair.step(["b"], 1)
    assert pair.ours.model.passes == [2 + 1]


def test_cached_prefix_without_the_draft_models_kv_is_computed() -> None:
    pair = Pair()
    pair.add("a", PROMPT)
    pair.step(["a"], 0)
    pair.add("b", [*PROMPT, 8, 8], prefix_of="a")
    pair.step(["b"], 1)
    assert pair.ours.model.passes == [len(PROMPT) + 2 + 1]


def test_prefix_that_several_rows_lack_is_computed_once() -> None:
    pair = Pair()
    pair.add("a", PROMPT)
    pair.step(["a"], 0)
    pair.add("b", [*PROMPT, 8], prefix_of="a")
    pair.step(["a", "b"], 0)
    pair.step(["a", "b"], 1)
    every_token = sum(len(row.tokens) for row in pair.ours.rows.values())
    assert pair.ours.model.passes == [
        every_token - BLOCK
    ]  # the second block is not known to be full


def test_blocks_of_an_ended_request_lose_their_drafts_kv_when_reused() -> None:
    runner, stock = make_runner(), make_runner(stock_speculator())
    for one in (runner, stock):
        one.add("a", PROMPT)
        one.step(["a"], LONGEST)
        one.num_blocks = 1  # all blocks are free again
        one.add("b", [*reversed(PROMPT), 8, 7])
    runner.step(["b"], 0)
    stock.step(["b"], LONGEST)
    assert runner.step(["b"], LONGEST) == stock.step(["b"], LONGEST)


@pytest.mark.parametrize("seed", range(num_examples(6)))
def test_drafts_are_those_of_vllm_after_any_sequence_of_lengths(seed: int) -> None:
    draw, pair, names, drafted = Random(seed), Pair(), ["a"], 0
    pair.add("a", PROMPT)
    for number in range(24):
        if number in (5, 9, 14):
            name = chr(ord("a") + len(names))
            pair.add(name, [*PROMPT, *draw.choices(range(50), k=draw.randrange(6))], prefix_of="a")
            names.append(name)
            drafted = 0
        length = draw.choice([0, 0, 1, 2, LONGEST])
        accepted = draw.randint(0, drafted)
        pair.step(
            names,
            length,
            Verified(num_drafts=drafted, num_accepted=accepted),
            prompt_tokens=MAX_TOKENS // len(names) - LONGEST if number < 16 else 3,
        )
        drafted = length if sum(len(r.tokens) for r in pair.ours.rows.values()) < 200 else 0


def test_first_pass_runs_in_every_step_with_sliding_windows() -> None:
    """Blocks behind a window are freed, so that missing tokens could not be computed later."""
    runner = make_runner(window=8)
    runner.add("a", PROMPT)
    runner.step(["a"], 0)
    assert runner.model.passes == [len(PROMPT) + 1]
