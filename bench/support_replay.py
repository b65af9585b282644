"""Benchmark: importance ratios of an unchanged policy, with and without replay of supports.

A complete service samples from the bundled model under each constraint. Then `coppice.train`
computes the tokens' logprobs with the same weights, once from the model's logits alone and once
over the returned supports. Each token's importance ratio should be 1. Another version of the
weights is published while some of the samples run; each token is compared with its own version.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.harness.in_process_service import running_service
from bench.harness.record import Record, Row, add_out
from coppice import AsyncRollouts, Group, StructuredOutputs, Support
from coppice.train import LogitAdjustments, TrainingGroup, group_logprobs, sampled_logprobs
from engine.sampling.support_encoding import encode_ids
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationMode, SpeculationSettings
from examples.seedling.measure import SEED, SEEDLING, held_out_problems
from service.config.settings import WeightsSettings

BAND = 0.01
INITIAL = WeightsSettings().initial_version
VOCABULARY = 151_936
ADJUSTED = {"logit_bias": {5: 2.0, 11: -1.5}, "presence_penalty": 0.3, "frequency_penalty": 0.2}
CONSTRAINTS: Mapping[str, Mapping[str, Any]] = {
    "no constraint": {},
    "temperature 0.7": {"temperature": 0.7},
    "top_p 0.8": {"top_p": 0.8},
    "top_k 5": {"top_k": 5},
    "min_p 0.1": {"min_p": 0.1},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 269, 2))},
    "bad_words": {"bad_words": ["1", "2", "="]},
    "min_tokens 16": {"min_tokens": 16, "ignore_eos": False},
    "structured_outputs": {"structured_outputs": StructuredOutputs(regex="[0-9+= ]{48}")},
    "bias and penalties": {**ADJUSTED, "repetition_penalty": 1.2},
    "top_p 0.9, top_k 20, bias": {"top_p": 0.9, "top_k": 20, **ADJUSTED},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    num_prompts: int
    num_samples: int
    max_tokens: int


@dataclass(slots=True)
class Ratios:
    """Importance ratios of tokens, without and with supports, and the size of the supports."""

    plain: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def row(self, what: str) -> Row:
        ratios = " -> ".join(
            f"{statistics.fmean(ratios):.3f} ({_outside(ratios):.1%} out of band)"
            for ratios in (self.plain, self.replayed)
        )
        size = self.num_bytes / len(self.replayed)
        return Row(what=what, value=f"{ratios}, {size:.1f} kB per 1,000 tokens")


def _outside(ratios: list[float]) -> float:
    return sum(abs(ratio - 1) > BAND for ratio in ratios) / len(ratios)


@cache
def model_of(version: str) -> Any:
    """The bundled model, or a copy with other weights for any version but the first."""
    model = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32).eval()
    if version != INITIAL:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.02 * parameter.std() * noise
    return model


def add_group(ratios: Ratios, prompt: list[int], group: Group, sampling: Mapping[str, Any]) -> None:
    names = LogitAdjustments.__dataclass_fields__
    adjustments = LogitAdjustments(**{name: sampling[name] for name in names if name in sampling})
    given = TrainingGroup.of(prompt, group, adjustments=adjustments)
    assert given.support is not None and given.logprobs is not None
    bare = replace(given, support=None, adjustments=LogitAdjustments())
    temperature = sampling.get("temperature", 1.0)
    for of_model, found in ((bare, ratios.plain), (given, ratios.replayed)):
        for index, sample in enumerate(group.samples):
            for span in sample.versions:
                model = model_of(span.version)
                one = replace(
                    of_model,
                    responses=of_model.responses[index : index + 1],
                    logprobs=None,
                    support=of_model.support and of_model.support[index : index + 1],
                )
                logprobs = group_logprobs(model, one, temperature=temperature).logprobs
                difference = logprobs - torch.from_numpy(sample.logprobs)
                found += difference[span.start : span.end].exp().tolist()
    ratios.num_bytes += sum(support.num_bytes for support in given.support)


async def sample(
    rollouts: AsyncRollouts,
    prompts: list[list[int]],
    load: Workload,
    sampling: Mapping[str, Any],
    publish: str | None = None,
) -> Ratios:
    """Ratios of one rollout; weights to publish are activated while its samples run."""
    options: dict[str, Any] = {"ignore_eos": True, "return_support": True, **sampling}
    pending = await rollouts.submit(
        prompts, n=load.num_samples, max_tokens=load.max_tokens, **options
    )
    if publish is not None:
        await rollouts.publish_weights(publish, model_of(publish).state_dict(), mode="recompute")
    result = await pending.wait()
    if publish is not None:
        spans = [s.versions for group in result.groups for s in group.samples]
        assert any(len(versions) > 1 for versions in spans), "the samples ended before the update"
    ratios = Ratios()
    for prompt, group in zip(prompts, result.groups, strict=True):
        add_group(ratios, prompt, group, sampling)
    return ratios


async def seconds_per_1000(
    rollouts: AsyncRollouts, prompts: list[list[int]], load: Workload, *, support: bool
) -> float:
    began = time.perf_counter()
    result = await rollouts.rollout(
        prompts,
        n=load.num_samples,
        max_tokens=load.max_tokens,
        top_p=0.8,
        ignore_eos=True,
        return_support=support,
    )
    return (time.perf_counter() - began) * 1000 / result.usage.num_generated_tokens


def trainer_row(num_tokens: int = 256, num_ids: int = 64) -> Row:
    """Time of forward and backward over the logits of a large vocabulary."""
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(num_tokens, VOCABULARY, generator=generator, requires_grad=True)
    ids = torch.randint(0, VOCABULARY, (num_tokens, num_ids), generator=generator).sort(1).values
    rows = [encode_ids(each.unique().numpy()) for each in ids]
    support = Support(tuple(b"\x01" + row for row in rows), VOCABULARY)
    targets = ids[:, 0]
    times = {"without": list[float](), "with": list[float]()}
    for _ in range(3):
        for name, given in (("without", None), ("with", support)):
            began = time.perf_counter()
            sampled_logprobs(logits, targets, support=given).sum().backward()  # type: ignore[no-untyped-call]
            times[name].append((time.perf_counter() - began) * 1000 / num_tokens)
    without, with_support = (statistics.median(times[name]) for name in ("without", "with"))
    return Row(
        what=f"trainer, vocabulary of {VOCABULARY}",
        value=f"{without:.2f} s -> {with_support:.2f} s per 1,000 tokens of forward and backward",
    )


async def measure(mode: SpeculationMode, load: Workload, engine: EngineSettings) -> list[Row]:
    name = "sibling drafts" if mode == "siblings" else "no drafts"
    async with (
        running_service(engine, speculation=SpeculationSettings(mode=mode)) as (vllm, url),
        AsyncRollouts(url) as rollouts,
    ):
        problems = held_out_problems(SEED, load.num_prompts)
        prompts = [vllm.encode_text(problem.prompt) for problem in problems]
        rows = [
            (await sample(rollouts, prompts, load, sampling)).row(f"{what}, {name}")
            for what, sampling in CONSTRAINTS.items()
        ]
        timed = [
            await seconds_per_1000(rollouts, prompts, load, support=bool(turn % 2))
            for turn in range(7)
        ][1:]
        without, with_support = statistics.median(timed[1::2]), statistics.median(timed[::2])
        updated = await sample(rollouts, prompts, load, {"top_p": 0.8}, publish="v1")
        return [
            *rows,
            updated.row(f"top_p 0.8 across an update, {name}"),
            Row(
                what=f"server, {name}",
                value=f"{without:.3f} s -> {with_support:.3f} s per 1,000 tokens",
            ),
        ]


def record(rows: list[Row]) -> Record:
    return Record(
        name="support_replay",
        claim="Mean importance ratio of an unchanged policy, and share of tokens whose ratio "
        f"differs from 1 by more than {BAND:.0%}: from the model's logits, then over the supports.",
        rows=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    add_out(parser)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    load = Workload(
        num_prompts=given.prompts, num_samples=given.samples, max_tokens=given.max_tokens
    )
    engine = EngineSettings(
        dtype="float32", seed=SEED, cpu_threads=given.threads, max_context_tokens=1024
    )
    modes: tuple[SpeculationMode, ...] = ("off", "siblings")
    rows = [row for mode in modes for row in asyncio.run(measure(mode, load, engine))]
    result = record([*rows, trainer_row()])
    result.show()
    print(f"\nwrote {result.write(given.out).name}")


if __name__ == "__main__":
    main()
