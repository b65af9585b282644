"""Benchmark: KV kept across weights updates, against prefilling the context again.

The weights are those of the first steps of the GRPO example, which runs first. Then conversations
are continued by one turn after each update. Each limit of the age of KV has conversations of its
own, under the same updates and with the same questions. Reference models compute the distributions
of the sampled tokens over exact KV, which the served weights compute alone, and over the KV that
`kv_versions` states.
"""

import argparse
import asyncio
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer

from bench.harness.grpo_checkpoints import INITIAL, checkpoints
from bench.harness.kv_teacher_forcing import Forced, Teacher, Turn
from bench.harness.record import Record, Row, add_out
from engine.settings import EngineSettings
from engine.types.samples import Completion, KeptKv, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from examples.grpo.questions import Question, Questions
from examples.seedling.enlarge import SEEDLING

Limit = Callable[..., KeptKv]
"""Limit of a conversation's KV, which is called with its chain."""
LIMITS: Final[dict[str, Limit | None]] = {
    "max_lag 0": partial(KeptKv, max_lag=0),
    "max_lag 1": partial(KeptKv, max_lag=1),
    "max_lag 2": partial(KeptKv, max_lag=2),
    "max_lag 4": partial(KeptKv, max_lag=4),
    "keep all": partial(KeptKv),
}
RECOMPUTE: Final = "recompute all"
TURN_TOKENS, BLOCK_SIZE, CONTEXT_TOKENS, CACHE_BYTES = 48, 32, 4096, 2**29
CLOSE: Final = 1e-3


@dataclass(slots=True)
class Conversation:
    """A conversation that is a chain if it keeps its KV, with its turns after the first update."""

    number: int
    kept: KeptKv | None
    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_prompt: int = 0
    num_prefilled: int = 0


class Experiment:
    """Conversations with each limit, continued after each update of one engine."""

    def __init__(
        self, engine: VllmEngine, num_conversations: int, limits: Mapping[str, Limit | None]
    ) -> None:
        self._engine = engine
        self._questions = Questions(_tokenizer(), seed=2, num_held_out=1)
        numbers = range(num_conversations)
        self.conversations = {
            name: [Conversation(n, limit and limit(chain=f"{name}/{n}")) for n in numbers]
            for name, limit in limits.items()
        }
        self._num_conversations = num_conversations
        self._num_turns = 0

    async def update(self, version: str, path: Path) -> None:
        await self._engine.pause("keep")
        await self._engine.update_weights(path, version, keep_kv=True)
        await self._engine.resume()

    async def turn(self, version: str) -> None:
        """Add the same questions to the conversations of all limits, and sample the answers."""
        asked = self._questions.draw(self._num_conversations)
        for conversations in self.conversations.values():
            await self._sample(conversations, asked, version)
        self._num_turns += 1

    async def _sample(
        self, conversations: Sequence[Conversation], asked: Sequence[Question], version: str
    ) -> None:
        for conversation, question in zip(conversations, asked, strict=True):
            conversation.token_ids += question.token_ids
        requests = [self._request(conversation) for conversation in conversations]
        answers = await asyncio.gather(*await self._engine.submit(requests))
        for conversation, answer in zip(conversations, answers, strict=True):
            if version != INITIAL:
                conversation.num_prompt += len(conversation.token_ids)
                conversation.num_prefilled += len(conversation.token_ids) - answer.num_cached_tokens
            conversation.token_ids += answer.token_ids
            if version != INITIAL:
                conversation.turns.append(_turn(version, conversation.token_ids, answer))

    def _request(self, conversation: Conversation) -> SampleRequest:
        chain = "" if conversation.kept is None else conversation.kept.chain
        return SampleRequest(
            id=f"{self._num_turns}/{conversation.number}/{chain}",
            prompt_token_ids=list(conversation.token_ids),
            sampling=Sampling(max_tokens=TURN_TOKENS),
            kept_kv=conversation.kept,
            seed=self._num_turns * self._num_conversations + conversation.number,
        )


def _turn(version: str, token_ids: Sequence[int], answer: Completion) -> Turn:
    return Turn(
        version=version,
        token_ids=list(token_ids),
        logprobs=list(answer.logprobs),
        kv_versions=answer.kv_versions,
    )


async def run(
    paths: Mapping[str, Path],
    num_conversations: int,
    limits: Mapping[str, Limit | None],
) -> Experiment:
    settings = EngineSettings(
        model=str(SEEDLING),
        dtype="float32",
        max_context_tokens=CONTEXT_TOKENS,
        block_size=BLOCK_SIZE,
        max_sequences=num_conversations,
        cpu_threads=1,
        cache_bytes=CACHE_BYTES,
    )
    engine = VllmEngine(settings)
    await engine.start(INITIAL)
    try:
        experiment = Experiment(engine, num_conversations, limits)
        for version, path in paths.items():
            if version != INITIAL:
                await experiment.update(version, path)
            await experiment.turn(version)
        return experiment
    finally:
        await engine.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over all tokens, with its standard error from the differences of conversations."""

    mean: float
    error: float

    @classmethod
    def of(cls, conversations: Sequence[Sequence[float]]) -> "Estimate":
        mean = statistics.fmean(value for values in conversations for value in values)
        num = statistics.fmean(map(len, conversations))
        sums = [sum(value - mean for value in values) / num for values in conversations]
        return cls(mean=mean, error=statistics.stdev(sums) / math.sqrt(len(sums)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Measurements of the conversations with one limit.

    A ratio is the returned probability of a token, divided by that of teacher forcing. The inverse
    of the ratio over exact KV is the importance ratio, whose mean is 1.
    """

    num_prompt_tokens: int
    num_prefilled_tokens: int
    kl: Estimate
    kl_by_update: list[float]
    ratio_stated: Estimate
    max_difference_stated: float
    ratio_exact: Estimate
    expected_ratio_exact: Estimate
    importance_ratio: Estimate
    max_versions: int

    @classmethod
    def of(cls, conversations: Sequence[Conversation], teacher: Teacher) -> "Result":
        forced = [[teacher.force(turn) for turn in each.turns] for each in conversations]
        stated = [[value for turn in each for value in turn.log_ratio_stated] for each in forced]
        exact = [[value for turn in each for value in turn.log_ratio_exact] for each in forced]
        spans = [turn.kv_versions for each in conversations for turn in each.turns]
        return cls(
            num_prompt_tokens=sum(each.num_prompt for each in conversations),
            num_prefilled_tokens=sum(each.num_prefilled for each in conversations),
            kl=Estimate.of([[kl for turn in each for kl in turn.kl] for each in forced]),
            kl_by_update=[_mean_kl(turns) for turns in zip(*forced, strict=True)],
            ratio_stated=Estimate.of(_ratios(stated)),
            max_difference_stated=max(abs(value) for each in stated for value in each),
            ratio_exact=Estimate.of(_ratios(exact)),
            expected_ratio_exact=Estimate.of(
                [[value for turn in each for value in turn.expected_ratio] for each in forced]
            ),
            importance_ratio=Estimate.of(_ratios(exact, inverse=True)),
            max_versions=max(len({span.version for span in each}) for each in spans),
        )

    @property
    def share(self) -> float:
        return self.num_prefilled_tokens / self.num_prompt_tokens


def _mean_kl(turns: Sequence[Forced]) -> float:
    return statistics.fmean(kl for turn in turns for kl in turn.kl)


def _ratios(logs: Sequence[Sequence[float]], *, inverse: bool = False) -> list[list[float]]:
    return [[math.exp(-value if inverse else value) for value in each] for each in logs]


def record_of(results: Mapping[str, Result], num_updates: int) -> Record:
    stated = [_stated_row(limit, result) for limit, result in results.items()]
    exact = [_exact_row(limit, result) for limit, result in results.items()]
    return Record(
        name="kv_across_updates",
        claim="Conversations that keep their KV across weights updates prefill only new tokens, at "
        "a divergence from exact KV that max_lag limits, and kv_versions is the KV that their "
        f"tokens were conditioned on; {num_updates} updates of the GRPO example.",
        rows=[_row(limit, result) for limit, result in results.items()] + stated + exact,
        raw={limit: asdict(result) for limit, result in results.items()},
    )


def _row(limit: str, result: Result) -> Row:
    mean, error = result.importance_ratio.mean, result.importance_ratio.error
    return Row(
        what=limit,
        value=f"{result.share:.1%} of prompt tokens prefilled, KL divergence {result.kl.mean:.1e} "
        f"+- {result.kl.error:.1e} nats per token, mean importance ratio {mean:.4f} +- {error:.4f}",
        goal="ratio 1 within three standard errors",
        verdict="met" if abs(mean - 1) <= 3 * error + 1e-5 else "missed",
    )


def _stated_row(limit: str, result: Result) -> Row:
    found = result.max_difference_stated
    return Row(
        what=f"{limit}: returned probability / teacher forcing over the KV of kv_versions",
        value=f"mean {result.ratio_stated.mean:.5f}, logprobs differ by at most {found:.1e}; up to "
        f"{result.max_versions} versions",
        goal=f"<= {CLOSE:.0e}",
        verdict="met" if found <= CLOSE else "missed",
    )


def _exact_row(limit: str, result: Result) -> Row:
    ratio, expected = result.ratio_exact, result.expected_ratio_exact
    return Row(
        what=f"{limit}: returned probability / teacher forcing under the served weights alone",
        value=f"mean {ratio.mean:.4f} +- {ratio.error:.4f}, expected {expected.mean:.4f} "
        f"+- {expected.error:.4f}",
    )


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SEEDLING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument(
        "--checkpoints", type=Path, help="directory in which checkpoints are kept for later runs"
    )
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = checkpoints(options.updates, options.checkpoints or Path(folder))
        experiment = asyncio.run(run(paths, options.conversations, {RECOMPUTE: None} | LIMITS))
        teacher = Teacher(paths)
    results = {
        limit: Result.of(conversations, teacher)
        for limit, conversations in experiment.conversations.items()
    }
    record = record_of(results, options.updates)
    record.write(options.out)
    record.show()


if __name__ == "__main__":
    main()
