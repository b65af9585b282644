"""Runs an engine with planned CUDA graphs in its own process, and times its decode steps.

The patch modifies a class, so two plans need two processes. They share the GPU and run in turn.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.cudagraphs.allowed_shapes import CaptureLimits
from engine.cudagraphs.counters import COUNTERS
from engine.cudagraphs.plan_from_environment import GRAPHS_ENV
from engine.cudagraphs.planner import Plan
from engine.speculation.settings import SpeculationSettings

STEPS, SETTLING = 20, 4
CONTEXT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """Decode step to be timed: the number of samples, and the draft tokens per sample."""

    samples: int
    drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    num_graphs: int
    measured_bytes: int
    hits: int
    misses: int


class Arm:
    """Benchmark arm: starts an engine with one CUDA graph plan in a process of its own.

    A failure in the process is printed with its traceback and raises EOFError here.
    """

    def __init__(self, model: Path, drafter: Path, limits: CaptureLimits, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        arguments = (there, str(model), str(drafter), limits, plan.to_json())
        self._process = context.Process(target=_work, args=arguments)
        self._process.start()
        there.close()
        assert self._here.recv() == "ready"

    def seconds(self, request: Request) -> float:
        """Mean seconds of a decode step of the requested size."""
        self._here.send(request)
        return float(self._here.recv())

    def captured(self) -> Captured:
        self._here.send("captured")
        answer = self._here.recv()
        assert isinstance(answer, Captured)
        return answer

    def __enter__(self) -> "Arm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._here.close()
        self._process.join(30)
        self._process.kill()


def _work(pipe: Connection, model: str, drafter: str, limits: CaptureLimits, plan: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", GRAPHS_ENV: plan}
    from engine.cudagraphs import graph_candidates
    from engine.drafter.feature import register_speculator
    from engine.speculation import settings as process_settings
    from engine.speculation.worker import speculator_factory

    graph_plan = Plan.from_json(plan)
    graph_candidates.install_plan(graph_plan)
    process_settings.install(SpeculationSettings(mode="drafter"))
    register_speculator()
    speculator_factory.install()
    engine = _Engine(_llm(model, drafter, limits, graph_plan))
    pipe.send("ready")
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        pipe.send(engine.captured() if asked == "captured" else engine.seconds(asked))


def _llm(model: str, drafter: str, limits: CaptureLimits, plan: Plan) -> Any:
    from vllm import LLM

    return LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=limits.max_sequences,
        max_num_batched_tokens=limits.max_batched_tokens,
        gpu_memory_utilization=0.42,
        compilation_config={"cudagraph_capture_sizes": plan.capture_sizes},
        speculative_config={
            "method": "draft_model",
            "model": drafter,
            "num_speculative_tokens": limits.max_query_len - 1,
            "num_speculative_tokens_per_batch_size": schedule(limits),
        },
    )


def schedule(limits: CaptureLimits) -> list[tuple[int, int, int]]:
    """vLLM's schedule of draft lengths: the longest allowed one for each number of samples.

    Every length must occur in the schedule, so that vLLM captures graphs for it.
    """
    ranges: list[tuple[int, int, int]] = []
    for samples in range(1, limits.max_sequences + 1):
        drafts = limits.lengths.at(samples)[-1]
        if ranges and ranges[-1][2] == drafts:
            ranges[-1] = (ranges[-1][0], samples, drafts)
        else:
            ranges.append((samples, samples, drafts))
    missing = {query_len - 1 for query_len in limits.lengths.query_lens} - {
        drafts for *_, drafts in ranges
    }
    assert not missing, f"the schedule leaves out drafts of {missing} tokens"
    return ranges


def prompt_of(row: int, vocabulary: int) -> list[int]:
    """Prompt of a sample. vLLM does not check its ids if the tokenizer is skipped."""
    return [2 + (7 * row + place) % (vocabulary - 2) for place in range(CONTEXT_TOKENS)]


class _Engine:
    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._number = self._hits = self._misses = 0

    def seconds(self, request: Request) -> float:
        """Mean seconds of a decode step of the requested size.

        All samples are past their prompt, and their number is constant.
        """
        import torch

        self._scheduler.dynamic_sd_lookup[:] = [request.drafts] * len(
            self._scheduler.dynamic_sd_lookup
        )
        names = [self._submit(row) for row in range(request.samples)]
        self._until(lambda: len(self._scheduler.running) == request.samples and self._decoding())
        self._step(SETTLING)
        torch.cuda.synchronize()
        before = _counted()
        began = time.perf_counter()
        self._step(STEPS)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / STEPS
        hits, misses = (now - then for now, then in zip(_counted(), before, strict=True))
        self._hits, self._misses = self._hits + hits, self._misses + misses
        self._engine.abort_request(names, internal=True)
        self._until(lambda: not self._scheduler.running)
        return seconds

    def captured(self) -> Captured:
        counted = COUNTERS.read()
        assert counted is not None, "nothing was captured to the plan"
        return Captured(
            num_graphs=counted["num_graphs"],
            measured_bytes=counted["measured_bytes"],
            hits=self._hits,
            misses=self._misses,
        )

    def _submit(self, row: int) -> str:
        from vllm import SamplingParams

        self._number += 1
        prompt = prompt_of(row, self._engine.model_config.get_vocab_size())
        params = SamplingParams(max_tokens=1024, ignore_eos=True, temperature=0, detokenize=False)
        name = self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, params)
        return str(name)

    def _decoding(self) -> bool:
        return all(request.num_output_tokens > 0 for request in self._scheduler.running)

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._engine.step()

    def _step(self, number: int) -> None:
        for _ in range(number):
            self._engine.step()


def _counted() -> tuple[int, int]:
    counted = COUNTERS.read()
    assert counted is not None, "nothing was captured to the plan"
    return counted["hits"], sum(steps for *_, steps in counted["misses"])
