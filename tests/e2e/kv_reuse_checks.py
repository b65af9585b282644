"""Spliced and predicted prompts in the end-to-end scene, concurrent with exports."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from bench.harness.hf_kv_prediction import HfPredictor
from bench.harness.hf_splice import HfAssembler
from coppice import AsyncRollouts, Kv, KvReuse
from coppice.rollout_results import RolloutResult
from coppice.wire.rollouts import PromptSpan
from service.kv.spans.prompt_template import joined
from tests.e2e.prompt_kv_checks import assert_all_match_model
from tests.serving import Served

FIRST_TOKENS = 8
TOOL, TALE = [5 + i % 90 for i in range(70)], [9 + i % 70 for i in range(55)]
OWN = [[3 + a, *range(30, 70 + a)] for a in range(3)]
EXPORTED = [[2 + i, *range(100, 160)] for i in range(4)]

Expected = Callable[[list[int]], torch.Tensor]


def parts_of(own: list[int]) -> list[PromptSpan]:
    return [
        PromptSpan(token_ids=own),
        PromptSpan(token_ids=TOOL, cache_key="tool"),
        PromptSpan(token_ids=TALE, cache_key="tale"),
        PromptSpan(token_ids=[4, 2]),
    ]


async def check_spliced_prompts(
    served: Served, rollouts: AsyncRollouts, version: str, model: Any
) -> None:
    """Splices prompts in two rounds.

    Spans are prefilled alone in the first, and only spliced in the second.
    """
    reuse = KvReuse(mode="splice", recompute_tokens=FIRST_TOKENS)
    for _ in range(2):
        placing = [ask(rollouts, parts_of(own), reuse) for own in OWN]
        exporting = rollouts.rollout(EXPORTED, n=2, max_tokens=8, kv=Kv())
        exported, *placed = await asyncio.gather(exporting, *placing)
        await assert_all_match_model(served, exported.groups, EXPORTED, version, model)
        for own, result in zip(OWN, placed, strict=True):
            assert_spliced(model, parts_of(own), result)
    assert placed[0].groups[0].kv_reuse is not None
    assert placed[0].groups[0].kv_reuse.num_prepared_tokens == 0
    served.server.kv_reuse.spans.check()


async def check_predicted_prompts(
    served: Served, rollouts: AsyncRollouts, version: str, model: Any
) -> None:
    """Predicts prompts.

    Two rounds are prefilled and become observations; the third is predicted from them.
    """
    reuse = KvReuse(mode="predict", max_entropy=1.0)
    rounds = [[varied_texts(own, number) for own in OWN] for number in range(3)]
    for number, asked in enumerate(rounds):
        placing = [ask(rollouts, parts, reuse) for parts in asked]
        exporting = rollouts.rollout(EXPORTED, n=2, max_tokens=8, kv=Kv())
        exported, *answers = await asyncio.gather(exporting, *placing)
        await assert_all_match_model(served, exported.groups, EXPORTED, version, model)
        told = [answer.groups[0].kv_reuse for answer in answers]
        expected = "no_observations" if number < 2 else None
        assert [one and one.reason for one in told] == [expected] * len(OWN)
    for index, result in enumerate(answers):
        first, second, parts = (asked[index] for asked in rounds)
        assert_approximate(model, parts, result, predicted_from(model, [first, second], parts))
    assert told[0] is not None and told[0].num_computed_tokens == 1
    served.server.kv_reuse.spans.check()
    served.server.kv_reuse.observations.check()


def predicted_from(
    model: Any, earlier: list[list[PromptSpan]], parts: list[PromptSpan]
) -> Expected:
    foreseen = HfPredictor(model)
    observations = [foreseen.observed(one) for one in earlier]

    def expected(tokens: list[int]) -> torch.Tensor:
        found = foreseen.assemble(parts, observations, tokens, max_entropy=1.0)
        assert found is not None
        return found

    return expected


def varied_texts(own: list[int], number: int) -> list[PromptSpan]:
    """Other texts under the same names, none longer than the first one."""
    texts = ([token + number for token in text[number:]] for text in (TOOL, TALE))
    own_part, tool, tale, ask_part = parts_of(own)
    named = [
        PromptSpan(token_ids=t, cache_key=p.cache_key)
        for t, p in zip(texts, (tool, tale), strict=True)
    ]
    return [own_part, *named, ask_part]


def ask(rollouts: AsyncRollouts, parts: list[PromptSpan], reuse: KvReuse) -> Any:
    how: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    return rollouts.rollout([parts], n=3, kv_reuse=reuse, **how)


def assert_spliced(model: Any, parts: list[PromptSpan], result: RolloutResult) -> None:
    def expected(tokens: list[int]) -> torch.Tensor:
        return HfAssembler(model).assemble(parts, tokens, recompute_tokens=FIRST_TOKENS)

    assert_approximate(model, parts, result, expected)


def assert_approximate(
    model: Any, parts: list[PromptSpan], result: RolloutResult, expected: Expected
) -> None:
    """Asserts log-probabilities of Hugging Face's forward over the intended KV."""
    [group] = result.groups
    assert group.kv_reuse is not None
    assert (group.exact, group.kv_reuse.reason) == (False, None)
    for sample in group.samples:
        tokens = sample.token_ids.tolist()
        exact = HfAssembler(model).dense(joined(parts), tokens)
        chosen, computed = (
            d.gather(1, torch.tensor(tokens)[:, None])[:, 0] for d in (expected(tokens), exact)
        )
        assert (chosen - torch.tensor(sample.logprobs)).abs().max() < 1e-3
        assert (chosen - computed).abs().max() > 1e-3, "the test would not see a difference"
