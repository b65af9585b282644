"""Held outputs against vLLM's own, over random traces of one engine, token by token."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import LogprobsLists

from engine.held_outputs import core as held_outputs
from engine.held_outputs.hold_option import HOLD_ARG
from engine.held_outputs.step_arrays import StepArrays
from engine.requests.held_outputs import attach
from engine.requests.request_params import sampling_params
from engine.speculation.counters import COUNTERS
from engine.types.samples import SampleRequest, Sampling
from tests.engine.model_families import save_family
from tests.engine.speculation.drafting_engine import drafting_engine
from tests.engine.stepped_engine import Answer, LiveEngine, Preemptions

# Imports of vLLM and its draft methods emit unrelated warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [5 + i % 90 for i in range(40)]
TRACES = range(4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    seeds = {"v0": 5, "v1": 6}
    return {
        name: save_family(folder / name, "mixture_of_experts", seed=seed)
        for name, seed in seeds.items()
    }


@pytest.fixture(scope="module")
def engine(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    """An engine whose KV cache cannot hold all samples of a trace at once."""
    folder = tmp_path_factory.mktemp("drafts")
    options: dict[str, Any] = {"num_gpu_blocks_override": 18, "enable_return_routed_experts": True}
    with drafting_engine(models["v0"], folder, **options) as (engine, _):
        yield engine


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Trace:
    """Requests and events of one run, which a run with held outputs repeats exactly."""

    seed: int
    holds: bool
    requests: dict[str, SampleRequest] = field(default_factory=dict)
    streamed: dict[str, list[tuple[list[int], list[float], str | None]]] = field(
        default_factory=dict
    )
    num_outputs: int = 0

    @property
    def swaps(self) -> bool:
        """True for a trace with weights updates; the others have drafts, whose number may differ.

        Drafts depend on earlier samples, and how far a sample is at an update depends on them.
        """
        return self.seed % 2 == 1

    def run(self, engine: LiveEngine, models: dict[str, Path]) -> dict[str, Answer]:
        draws, clock = random.Random(self.seed), Clock()
        scheduler = engine.core.scheduler
        scheduler.__dict__["coppice_held_outputs"] = held_outputs.HeldOutputs(scheduler, clock)
        for number in range(16):
            self._submit(engine, draws, number)
            for _ in range(draws.randrange(3)):
                clock.now += draws.choice([0.0, 0.01, 0.06, 1.1])
                engine.step()
            if self.swaps and draws.random() < 0.3:
                engine.swap(models[draws.choice(["v0", "v1"])])
            if draws.random() < 0.2:
                engine.abort(draws.choice(list(self.requests)))
        while scheduler.has_unfinished_requests():
            clock.now += draws.choice([0.0, 0.01, 0.06])
            engine.step()
        engine.swap(models["v0"])
        return {
            name: engine._answers.pop(name) for name in self.requests if name in engine._answers
        }

    def _submit(self, engine: LiveEngine, draws: random.Random, number: int) -> None:
        name = f"{'held' if self.holds else 'plain'}-{self.seed}-{number}"
        streams, group = draws.random() < 0.5, draws.randrange(3)
        is_greedy = draws.random() < 0.7  # samples with a seed are not drafted
        request = SampleRequest(
            id=name,
            prompt_token_ids=[*PROMPT, group],
            group=f"{name[:5]}-{group}-{self.seed}",
            seed=None if is_greedy else draws.randrange(1000),
            speculation=not self.swaps and draws.random() < 0.8,
            support=draws.random() < 0.4,
            num_top_logprobs=draws.choice([0, 0, 3]),
            returns_logprobs=draws.random() < 0.8,
            experts_from=draws.choice([None, 0]),
            on_tokens=(lambda _: None) if streams else None,
            sampling=Sampling(
                max_tokens=draws.choice([1, 40, 120, 120]),
                temperature=0.0 if is_greedy else 0.8,
                top_k=draws.choice([0, 8]),
                stop_token_ids=tuple(draws.sample(range(90), 2)) if draws.random() < 0.3 else (),
                ignore_eos=True,
            ),
        )
        params = sampling_params(request, 512)
        assert params.extra_args is not None
        if not self.holds:
            del params.extra_args[HOLD_ARG]
        prompt: Any = {"prompt_token_ids": list(request.prompt_token_ids)}
        prompt["cache_salt"] = name[:5] + str(self.seed)
        llm = engine._llm.llm_engine
        self.requests[name] = request
        llm.add_request(name, prompt, params)
        [internal] = llm.output_processor.external_req_ids[name]
        self.streamed[name] = []
        attach(llm, internal, self._receiver(name))

    def _receiver(self, name: str) -> Callable[[Any, Any, str | None], None]:
        def receive(_: Any, output: Any, version: str | None) -> None:
            found = output.new_logprobs
            logprobs = [] if found is None else found.logprobs[:, 0].tolist()
            self.streamed[name].append((list(output.new_token_ids), logprobs, version))
            self.num_outputs += 1

        return receive


def tokens_of(deltas: list[tuple[list[int], list[float], str | None]]) -> list[Any]:
    """Token, logprob and version of each streamed token."""
    return [
        each
        for ids, logprobs, version in deltas
        for each in zip(ids, logprobs or [0.0] * len(ids), [version] * len(ids), strict=True)
    ]


@pytest.mark.engine
def test_held_outputs_have_the_items_of_the_outputs_of_vllm(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    preempted, accepted = Preemptions(engine), sum(COUNTERS.read()["accepted"].values())
    updated = 0
    for seed in TRACES:
        plain, held = Trace(seed, holds=False), Trace(seed, holds=True)
        expected, found = plain.run(engine, models), held.run(engine, models)
        assert held.num_outputs < 0.7 * plain.num_outputs
        assert len(expected) == len(found) > 6
        for name, answer in found.items():
            plain_name = name.replace("held", "plain")
            other = expected[plain_name]
            np.testing.assert_array_equal(answer.experts, other.experts)
            assert replace(answer, experts=None) == replace(other, experts=None)
            # The tokens of its last outputs are returned at its end only.
            ours, theirs = tokens_of(held.streamed[name]), tokens_of(plain.streamed[plain_name])
            assert ours == theirs[: len(ours)]
            updated += len(answer.versions) > 1
    assert preempted.count > 20 and updated > 4
    assert sum(COUNTERS.read()["accepted"].values()) > accepted + 100


@pytest.mark.parametrize("starts", [None, [0, 1, 3, 6]])
def test_arrays_return_the_rows_of_every_step(starts: list[int] | None) -> None:
    draws, arrays = np.random.default_rng(0), StepArrays()
    steps, firsts = list[LogprobsLists](), list[int]()
    for width in [1, 4, 2, 4, 21] * 200:
        number = 6 if starts else 3
        steps.append(
            LogprobsLists(
                draws.integers(0, 1000, (number, width), dtype=np.int32),
                draws.random((number, width), dtype=np.float32),
                draws.integers(0, 1000, number),
                starts,
            )
        )
        firsts.append(arrays.append(steps[-1]))
    taken = arrays.take([first + 2 for first in firsts], 1)
    assert taken.logprobs[:, 0].tolist() == [step.logprobs[2, 0] for step in steps]
    assert taken.sampled_token_ranks.tolist() == [step.sampled_token_ranks[2] for step in steps]
    wide = arrays.take([firsts[-1]], 21)
    np.testing.assert_array_equal(wide.logprob_token_ids, steps[-1].logprob_token_ids[:1])
    arrays.clear()
    assert arrays.append(steps[0]) == 0
