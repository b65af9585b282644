"""One arm of the speculation benchmark: an engine in a process of its own, told what to run.

    python -m bench.harness.drafting ARM MODEL CACHE

Each line of its input is a workload in JSON; it answers with a line of what came of it. Nothing
computes between two lines, so arms lie side by side and take turns. Its environment is that of the
server's EngineCore.
"""

import json
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from engine.settings import AttentionSettings, SpeculationSettings
from engine.speculation.controller import Controller, Draft
from kernels.drafts.drafted import Int32Array

LONGEST = 8
ROWS = 64
OURS = {
    "method": "custom_class",
    "model": "engine.speculation.proposer.Proposer",
    "num_speculative_tokens": LONGEST,
    "num_speculative_tokens_per_batch_size": [(1, ROWS, LONGEST)],
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
END = 1
"""The seedling's token that ends a response."""
BUCKETS = (1, 8, 32, ROWS)
"""Running samples, up to so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`ignore_eos`: every sample has `max_tokens`, so that all run to the end."""

    seed: int
    temperature: float
    groups: int = 8
    size: int = 8
    max_tokens: int = 512
    ignore_eos: bool = False


@dataclass(slots=True)
class Came:
    """By the number of running samples that a step had, at most: seconds, tokens and steps."""

    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds_at: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tokens_at: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    steps_at: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def told(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Fixed(Controller):
    """Every draft is cut to one length, whatever it is worth."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def wants_drafts(self, running: int) -> bool:
        return self._length > 0

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        return np.minimum(drafted.lengths, self._length).astype(np.int32)


class Arm:
    """`off`, `ours`, `fixed-K`, `ngram` or `suffix`; vLLM is the same in all of them, its own
    attention included."""

    def __init__(self, name: str, model: Path, cache: Path) -> None:
        from vllm import LLM

        from engine.attention import installed as attention
        from engine.patches.installed import install_patches
        from engine.speculation import installed

        install_patches("EngineCore")
        attention.install(AttentionSettings(shared_prefix="off"))
        installed.install(
            SpeculationSettings(mode="siblings", longest_draft=LONGEST, cache_directory=cache)
        )
        ours = name == "ours" or name.startswith("fixed")
        config = OURS if ours else {"ngram": NGRAM, "suffix": {"method": "suffix"}}.get(name)
        dummy = not any(model.glob("*.safetensors"))
        self._llm = LLM(
            str(model),
            load_format="dummy" if dummy else "auto",
            dtype="bfloat16",
            block_size=32,
            max_model_len=1024,
            max_num_seqs=ROWS,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=2**30,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            speculative_config=config,
            per_request_spec_decode_metrics="none" if config is None else "summary",
        )
        core: Any = self._llm.llm_engine.engine_core
        self._core = core.engine_core
        self._number = 0
        if ours:
            self._wire(name)

    def _wire(self, name: str) -> None:
        from engine.speculation.profile import batches, num_tokens

        proposer = self._core.model_executor.driver_worker.worker.model_runner.drafter
        proposer.verify(proposer_runner(self._core))
        proposer.wire(proposer_runner(self._core))
        if proposer.begin_profile():
            for batch in batches(max_sequences=ROWS, max_context_tokens=1000, longest=LONGEST):
                prompts = [[7] * batch.prompt] * batch.running
                self._begin(prompts, max_tokens=num_tokens(LONGEST), ignore_eos=True)
                self._steps(Came())
            proposer.end_profile()
        if name.startswith("fixed-"):
            proposer.speculator.controller = Fixed(int(name.removeprefix("fixed-")))

    def run(self, work: Workload) -> Came:
        from engine.speculation.rows import GROUP

        came = Came()
        for number, prompt in enumerate(prompts(work)):
            self._begin(
                [prompt] * work.size,
                max_tokens=work.max_tokens,
                ignore_eos=work.ignore_eos,
                temperature=work.temperature,
                extra_args={GROUP: f"{work.seed}.{number}"},
            )
        began = time.perf_counter()
        self._steps(came)
        came.seconds = time.perf_counter() - began
        return came

    def _begin(self, prompts: list[list[int]], **sampling: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ends = [] if sampling.get("ignore_eos") else [END]
        params = SamplingParams(
            detokenize=False,
            logprobs=0,
            stop_token_ids=ends,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **sampling,
        )
        for prompt in prompts:
            self._number += 1
            self._llm.llm_engine.add_request(
                str(self._number), {"prompt_token_ids": prompt}, params
            )

    def _steps(self, came: Came) -> None:
        scheduler = self._core.scheduler
        while scheduler.has_unfinished_requests():
            began = time.perf_counter()
            there = [
                (request, request.num_output_tokens) for request in scheduler.requests.values()
            ]
            outputs = self._llm.llm_engine.step()
            bucket = next(most for most in BUCKETS if len(there) <= most)
            new = sum(request.num_output_tokens - before for request, before in there)
            came.seconds_at[bucket] += time.perf_counter() - began
            came.tokens_at[bucket] += new
            came.steps_at[bucket] += 1
            came.tokens += new
            for output in outputs:
                self._count(output.outputs[0].spec_decode_metrics, came)

    def _count(self, metrics: Any, came: Came) -> None:
        if metrics is not None:
            came.drafted += metrics.num_draft_tokens
            came.accepted += sum(length * n for length, n in enumerate(metrics.histogram))


def proposer_runner(core: Any) -> Any:
    return core.model_executor.driver_worker.worker.model_runner


def prompts(work: Workload) -> list[list[int]]:
    """Problems that the model was not trained on; each run has its own."""
    from transformers import AutoTokenizer

    from examples.seedling import arithmetic

    chance = random.Random(work.seed)
    tokenizer = AutoTokenizer.from_pretrained(SEEDLING)
    problems = [arithmetic.draw(chance, held_out=True) for _ in range(work.groups)]
    return [tokenizer.encode(problem.prompt) for problem in problems]


SEEDLING = Path(__file__).parents[2] / "examples" / "seedling" / "model"


def main(name: str, model: str, cache: str) -> None:
    arm = Arm(name, Path(model), Path(cache))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(arm.run(Workload(**json.loads(line))).told()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
