"""Benchmark: speedup if KV of a text that occurs after many prefixes is spliced, not prefilled.

Five agents receive each other's messages. In every round, an agent's prompt is its own text, the
question, and the messages of the other four in the previous round. The arms (configurations)
alternate on one engine: prefilled with prefix caching; spliced, with different numbers of first
tokens recomputed; and predicted from what the agent received in earlier rounds, of which the first
two are prefilled. Prompts have about a thousand tokens, or 512 tokens per message. Messages are
random, because the time does not depend on them.

The error of spliced or predicted prompts against prefilled ones is measured separately: on the
seedling as trained (bench/harness/splice_error.py, bench/harness/prediction_threshold_sweep.py),
and for spliced prompts on a seedling trained on other agents' messages, including the accuracy of
its answers (bench/harness/multi_agent_splice_error.py).

Goals apply to all prompts of an arm, including those that it had to prefill.
"""

import argparse
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field

import uvloop

from bench.harness.in_process_service import running_service
from bench.harness.multi_agent_prompts import MultiAgentPrompts, num_prompt_tokens
from bench.harness.multi_agent_splice_error import evaluate_agents
from bench.harness.multi_agent_table import agents_rows
from bench.harness.paired_runs import Pairs
from bench.harness.prediction_threshold_sweep import prediction_rows, predictions
from bench.harness.record import Record, Row, add_out
from bench.harness.splice_error import Distance, distances
from coppice import AsyncRollouts, KvReuse, PromptSpan
from engine.settings import EngineSettings
from service.config.prompt_kv import KvSettings

FIRST_TOKENS = (0, 1, 4, 16, 64)
PREFILL = {"prefilled": KvReuse(mode="off")}
# Messages are random, so all texts have similar distances.
PREDICT = {"predicted": KvReuse(mode="predict", max_entropy=1.0)}
PROBLEMS_A_TEXT = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of the benchmark's agent prompts, number of rounds, and KV reuse modes to compare."""

    num_own_tokens: int
    rounds: int
    modes: dict[str, KvReuse]


def splice_modes(recompute_tokens: int) -> str:
    return f"spliced ({recompute_tokens} recomputed per span)"


def shapes_of(recompute_tokens: int, rounds: int) -> tuple[Shape, Shape]:
    """The prompt shapes to measure; the first one covers all KV reuse modes.

    Its spliced modes form a curve over the number of recomputed tokens. The goal applies to it.
    """
    curve = {
        splice_modes(k): KvReuse(mode="splice", recompute_tokens=k)
        for k in (recompute_tokens, 0, 64)
    }
    only = {splice_modes(recompute_tokens): curve[splice_modes(recompute_tokens)]}
    return (
        Shape(num_own_tokens=120, rounds=rounds, modes=PREFILL | curve | PREDICT),
        Shape(num_own_tokens=512, rounds=max(1, rounds - 1), modes=PREFILL | only),
    )


@dataclass(slots=True)
class Arm:
    """Measurements of one KV reuse mode, one entry per request.

    `later` are the times of a round's requests after its first. `predicted` are the indices of
    predicted requests.
    """

    seconds: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    round_trips: list[int] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(self.reused) / (sum(self.reused) + sum(self.computed))


async def measure_time(model: str, shapes: Sequence[Shape], block: int) -> list[dict[str, Arm]]:
    settings = EngineSettings(
        model=model,
        seed=0,
        max_context_tokens=4096,
        cache_bytes=2**31,
        prompt_kv=True,
        block_size=block,
    )
    kv = KvSettings(spans_bytes=2**29)
    async with (
        running_service(settings, kv=kv) as (engine, url),
        AsyncRollouts(url, timeout=600) as rollouts,
    ):
        return [await one_shape(rollouts, shape, engine.info.vocab_size) for shape in shapes]


async def one_shape(rollouts: AsyncRollouts, shape: Shape, vocab_size: int) -> dict[str, Arm]:
    """Measure all KV reuse modes on prompts of one shape, alternating between them.

    Agents' own texts are cached first, as after any first round.
    """
    arms = {way: Arm() for way in shape.modes}
    talks = {
        way: MultiAgentPrompts(f"{way} {shape.num_own_tokens}", shape.num_own_tokens, vocab_size)
        for way in arms
    }
    for talk in talks.values():
        await rollouts.rollout(talk.own, max_tokens=1)
    for number in range(shape.rounds):
        for way in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            await one_round(rollouts, talks[way].prompts(), shape.modes[way], arms[way])
    return arms


async def one_round(
    rollouts: AsyncRollouts, prompts: Sequence[list[PromptSpan]], reuse: KvReuse, arm: Arm
) -> None:
    """Measure the time to first token of each prompt of a round, one after another."""
    for agent, prompt in enumerate(prompts):
        began = time.perf_counter()
        result = await rollouts.rollout([prompt], max_tokens=1, kv_reuse=reuse)
        seconds = time.perf_counter() - began
        told = result.groups[0].kv_reuse
        assert told is not None and told.reason in (None, "no_observations"), told
        arm.predicted += [len(arm.seconds)] if told.num_observations else []
        arm.seconds.append(seconds)
        arm.later += [seconds] if agent else []
        arm.reused.append(told.num_reused_tokens)
        arm.computed.append(told.num_computed_tokens + told.num_prepared_tokens)
        arm.round_trips.append(told.num_round_trips)


def time_rows(shape: Shape, arms: dict[str, Arm], recompute_tokens: int) -> list[Row]:
    what, goals = (
        f"{num_prompt_tokens(shape.num_own_tokens)} tokens",
        {splice_modes(recompute_tokens), *PREDICT},
    )
    rows = []
    for way in [way for way in arms if way != "prefilled"]:
        for which, of in (("all prompts", "seconds"), ("a round's later prompts", "later")):
            ratio = Pairs(a=getattr(arms["prefilled"], of), b=getattr(arms[way], of)).ratio()
            rows.append(
                Row(
                    what=f"{what}: TTFT of {which}, prefilled / {way}",
                    value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
                    goal=">= 3" if way in goals else "",
                    verdict=ratio.verdict(3.0) if way in goals else "",
                )
            )
    rows += [row for arm in arms.values() if arm.predicted for row in _predicted(what, arms, arm)]
    return (
        rows
        + [_format_result(what, way, arm) for way, arm in arms.items()]
        + _rates(what, arms, goals)
    )


def _predicted(what: str, arms: dict[str, Arm], arm: Arm) -> list[Row]:
    """Table rows that compare predicted prompts with the same prompts when prefilled.

    The other prompts are the observations (prompts from which others are predicted). There is
    no goal, because the prompts were selected by their outcome.
    """
    pairs = [(arms["prefilled"].seconds[i], arm.seconds[i]) for i in arm.predicted]
    computed, seconds = ([pair[i] for pair in pairs] for i in (0, 1))
    ratio = Pairs(a=computed, b=seconds).ratio()
    reused, num = sum(arm.reused[i] for i in arm.predicted), len(pairs)
    rate = reused / (reused + sum(arm.computed[i] for i in arm.predicted))
    return [
        Row(
            what=f"{what}: TTFT of predicted prompts, prefilled / predicted",
            value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}], {num} prompts, "
            f"median {1000 * statistics.median(seconds):.0f} ms",
        ),
        Row(
            what=f"{what}: KV reused in the spans of predicted prompts",
            value=f"{100 * rate:.0f} %",
        ),
    ]


def _format_result(what: str, way: str, arm: Arm) -> Row:
    median, mean = (1000 * of(arm.seconds) for of in (statistics.median, statistics.mean))
    trips = statistics.mean(arm.round_trips)
    return Row(
        what=f"{what}: TTFT, {way}",
        value=f"median {median:.0f} ms, mean {mean:.0f} ms, {trips:.1f} round trips",
    )


def _rates(what: str, arms: dict[str, Arm], goals: Collection[str]) -> list[Row]:
    return [
        Row(
            what=f"{what}: KV reused, {way}",
            value=f"{100 * arm.rate:.0f} %",
            goal=">= 70 %" if way in goals else "",
            verdict=("met" if arm.rate >= 0.7 else "missed") if way in goals else "",
        )
        for way, arm in arms.items()
    ]


def distance_rows(found: Sequence[Distance]) -> list[Row]:
    rows = []
    for distance in found:
        what = f"{distance.num_tokens:.0f} tokens"
        surprise = f"{distance.surprise:.2f} nats per token"
        label = f"{what} of arithmetic: negative log-likelihood after a prefilled prompt"
        rows.append(Row(what=label, value=surprise))
        for recompute_tokens, values in distance.divergences.items():
            mean, share = statistics.mean(values), 100 * distance.shares[recompute_tokens]
            worst = f"worst prompt {max(values):.3f}, {share:.0f} % spliced"
            rows.append(
                Row(
                    what=f"{what} of arithmetic: KL divergence, {splice_modes(recompute_tokens)}",
                    value=f"{mean:.4f} nats per token, {worst}",
                    goal="< 0.05",
                    verdict="met" if mean < 0.05 else "missed",
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="enlarged seedling, for timing")
    parser.add_argument("--agents", required=True, help="seedling trained on the multi-agent task")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--recompute-tokens", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=32)
    add_out(parser)
    options = parser.parse_args()
    found = distances(FIRST_TOKENS, options.block_size)
    predicted = [predictions(num_problems) for num_problems in PROBLEMS_A_TEXT]
    heard = evaluate_agents(options.agents, FIRST_TOKENS, options.block_size)
    shapes = shapes_of(options.recompute_tokens, options.rounds)
    measured = uvloop.run(measure_time(options.model, shapes, options.block_size))
    rows = [
        row
        for shape, arms in zip(shapes, measured, strict=True)
        for row in time_rows(shape, arms, options.recompute_tokens)
    ]
    record = Record(
        name="cross_context",
        claim=(
            "KV of prompt spans, spliced or predicted behind other prefixes than the one that it "
            "was computed with, against prefix caching, for the prompts of five agents. Goals: a "
            "TTFT that is 3 times shorter, 70 % of tokens reused, a KL divergence below 0.05 nats "
            "per token, and, for spliced prompts, an accuracy within one point."
        ),
        rows=rows + distance_rows(found) + prediction_rows(predicted) + agents_rows(heard),
        raw={
            "seconds": [{way: arm.seconds for way, arm in arms.items()} for arms in measured],
            "divergences": [distance.divergences for distance in found],
            "predictions": [of.divergences for of in predicted],
            "agents": [asdict(one) for one in heard],
        },
    )
    record.show()
    record.write(options.out)


if __name__ == "__main__":
    main()
