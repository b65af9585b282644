"""Process of one arm (drafter configuration) of the speculation benchmark, with its engine.

    python -m bench.harness.speculation_arm ARM MODEL CACHE

Each input line is JSON with a workload and, optionally, the texts that its samples must generate.
The output is one line per workload with its results. The process is idle between two lines, so arms
run concurrently and in turn. Its environment is that of the server's EngineCore.
"""

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.teacher_forced import Fixed, OraclePolicy, TeacherForced
from engine.attention.settings import AttentionSettings
from engine.runtime.process_environment import CACHE_ENV
from engine.speculation.counters import Counters
from engine.speculation.cpu_speculator import Speculator
from engine.speculation.drafting_base import STORE_BYTES
from engine.speculation.settings import SpeculationSettings
from engine.speculation.startup import PROFILE_SECONDS
from kernels.draft_index.compiled_store import DraftStore

LONGEST = 8
ROWS = 64
OURS = {
    "method": "custom_class",
    "model": "engine.speculation.custom_class_proposer.Proposer",
    "num_speculative_tokens": LONGEST,
    "num_speculative_tokens_per_batch_size": [(1, ROWS, LONGEST)],
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
GNU = "-gnu"
"""Suffix of the name of an arm that runs with GNU's OpenMP instead of Intel's."""
DISABLED = "disabled"
"""Prefix of the names of arms that run in the engine of `ours` with its drafting switched off."""
END = 1
"""The seedling's end-of-response token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Groups to sample in one run. With `ignore_eos` all samples have `max_tokens` tokens."""

    seed: int
    temperature: float
    groups: int = 8
    size: int = 8
    max_tokens: int = 512
    ignore_eos: bool = False


@dataclass(slots=True)
class RunResult:
    """Times, counts and texts of one run of a workload.

    `decoded` holds, for each step without prefill, its rows, their context, the tokens computed and
    emitted, and seconds. `cpu_seconds` is the CPU time of these steps in the thread that runs them.
    `texts` are all samples in the order of their prompts; `surprise` is the total negative
    log-likelihood of their tokens in nats.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    surprise: float = 0.0
    decoded: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)


class Arm:
    """Engine with one drafter: `off` (none), `ours`, `ngram` or `suffix`.

    vLLM is identical in all arms, including its own attention; if the name ends in GNU, it runs
    with GNU's OpenMP. `ours` can be limited to a fixed draft length, use the oracle or be disabled
    (`run`).
    """

    def __init__(self, name: str, model: Path, cache: Path) -> None:
        from vllm import LLM

        from engine.attention import register as attention
        from engine.launch.plugin import install_patches
        from engine.speculation import settings as process_settings

        name = name.removesuffix(GNU)
        install_patches("EngineCore")
        attention.install(AttentionSettings(shared_prefix="off"))
        os.environ[CACHE_ENV] = str(cache)
        process_settings.install(SpeculationSettings(mode="siblings", longest_draft=LONGEST))
        config = {"ours": OURS, "ngram": NGRAM, "suffix": {"method": "suffix"}}.get(name)
        dummy = not any(model.glob("*.safetensors"))
        self._llm = LLM(
            str(model),
            load_format="dummy" if dummy else "auto",
            dtype="bfloat16",
            block_size=32,
            max_model_len=1024,
            max_num_seqs=ROWS,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=2**29,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=True,
            disable_log_stats=False,
            speculative_config=config,
            per_request_spec_decode_metrics="none" if config is None else "summary",
        )
        core: Any = self._llm.llm_engine.engine_core
        self._core = core.engine_core
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._number = 0
        self._speculators: dict[str, Speculator] = {}
        self._teacher_forced = TeacherForced(self._runner)
        if name == "ours":
            self._attach()

    def _attach(self) -> None:
        from engine.speculation.cost import num_tokens, profile_batches

        proposer = self._runner.drafter
        proposer.install(self._runner)
        proposer.attach(self._runner)
        if not proposer.begin_profile():
            return
        began = time.monotonic()
        for number, batch in enumerate(
            profile_batches(max_sequences=ROWS, max_context_tokens=1000, max_draft_tokens=LONGEST)
        ):
            if number > 1 and time.monotonic() - began > PROFILE_SECONDS:
                break
            prompts = [[7] * batch.prompt] * batch.running
            self._begin(prompts, max_tokens=num_tokens(LONGEST), ignore_eos=True)
            self._steps(RunResult())
        proposer.end_profile()

    def run(self, name: str, work: Workload, texts: list[list[int]] | None) -> RunResult:
        """Run a workload. If texts are given, the samples generate exactly those tokens."""
        from engine.speculation.request_table import GROUP_ARG

        came, ids = RunResult(), []
        self._switch_to(name.removesuffix(GNU))
        for number, prompt in enumerate(prompts(work)):
            ids += self._begin(
                [prompt] * work.size,
                max_tokens=work.max_tokens,
                ignore_eos=work.ignore_eos,
                temperature=work.temperature,
                extra_args={GROUP_ARG: f"{work.seed}.{number}"},
            )
        self._teacher_forced.texts = {} if texts is None else dict(zip(ids, texts, strict=True))
        began = time.perf_counter()
        said = self._steps(came)
        came.seconds = time.perf_counter() - began
        came.texts = [said[one] for one in ids]
        return came

    def _switch_to(self, name: str) -> None:
        """Switch the engine to another draft-length policy, such as a fixed length or the oracle.

        Each has its own draft store and controller, since all generate the same texts.
        """
        if name in ("off", "ngram", "suffix"):
            return
        drafter = self._runner.drafter
        drafter.is_enabled = not name.startswith(DISABLED)
        if not drafter.is_enabled:
            return
        if not self._speculators:
            self._speculators["ours"] = drafter.speculator
        if name not in self._speculators:
            kind, _, length = name.partition("-")
            self._speculators[name] = Speculator(
                self._runner,
                DraftStore(max_bytes=STORE_BYTES, max_draft_tokens=LONGEST),
                Fixed(int(length)) if kind == "fixed" else OraclePolicy(self._teacher_forced),
                Counters(),
                max_draft_tokens=LONGEST,
            )
        drafter.speculator = self._speculators[name]

    def _begin(self, prompts: list[list[int]], **sampling: Any) -> list[str]:
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
        ids = []
        for prompt in prompts:
            self._number += 1
            asked = {"prompt_token_ids": prompt}
            ids.append(self._llm.llm_engine.add_request(str(self._number), asked, params))
        return ids

    def _steps(self, came: RunResult) -> dict[str, list[int]]:
        scheduler, said = self._core.scheduler, {}
        while scheduler.has_unfinished_requests():
            there = {name: each.num_output_tokens for name, each in scheduler.requests.items()}
            requests = dict(scheduler.requests)
            began, cpu_began = time.perf_counter(), time.thread_time()
            outputs = self._llm.llm_engine.step()
            seconds, cpu_seconds = time.perf_counter() - began, time.thread_time() - cpu_began
            new = sum(each.num_output_tokens - there[n] for n, each in requests.items())
            came.tokens += new
            if all(there.values()):
                came.decoded.append((*self._computed(len(there)), new, seconds))
                came.cpu_seconds += cpu_seconds
            for name, request in requests.items():
                if request.is_finished():
                    said[name] = list(request.output_token_ids)
            for output in outputs:
                self._count(output.outputs[0], came)
        return said

    def _computed(self, rows: int) -> tuple[int, int, int]:
        context = int(self._runner.input_batch.num_tokens_no_spec[:rows].sum())
        return rows, context, int(self._runner.query_start_loc.np[rows])

    def _count(self, answer: Any, came: RunResult) -> None:
        if not self._teacher_forced.texts:
            each = zip(answer.token_ids, answer.logprobs, strict=True)
            came.surprise -= sum(of[token].logprob for token, of in each)
        if (metrics := answer.spec_decode_metrics) is not None:
            came.drafted += metrics.num_draft_tokens
            came.accepted += sum(length * n for length, n in enumerate(metrics.histogram))


def prompts(work: Workload) -> list[list[int]]:
    """Prompts of a workload: held-out problems, different ones for each seed."""
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
        told = json.loads(line)
        came = arm.run(told["name"], Workload(**told["work"]), told["texts"])
        print(json.dumps(asdict(came)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
