"""Decoding with shared prefixes read once a step, against vLLM's own attention, end to end.

One engine in one process; every decode step is timed whole (scheduler to outputs), and
neighbouring steps of the same samples go to the two kinds of attention in turn, with a third that
leaves attention out as the bound. The process has the environment of the server's EngineCore.
The model has 25M random parameters: 8 layers, 8 query and 4 KV heads of 64, bfloat16.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.pairs import Pairs, Ratio
from bench.harness.record import Record, Row
from engine.environment import spawning, started_by_coppice
from engine.settings import AttentionSettings, EngineSettings

BLOCK, VOCAB, LONGEST = 32, 512, 16384
DRAFTED = 4
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2 * LONGEST,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`system` tokens that all share, then groups of samples with `prefix` tokens of their own."""

    num_groups: int
    group_size: int
    prefix: int
    system: int = 0
    goal: float | None = None

    @property
    def name(self) -> str:
        groups = "group" if self.num_groups == 1 else "groups"
        system = f" behind {self.system} tokens that all share" if self.system else ""
        if self.group_size == 1:
            return f"{self.num_groups} different prompts of {self.prefix}"
        return f"{self.num_groups} {groups} of {self.group_size}, prefix {self.prefix}{system}"

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.group_size

    def prompts(self) -> list[list[int]]:
        """The first group's prompts of all lengths begin alike: they are computed once."""
        system = _tokens(10**6, self.system)
        own = (_tokens(group, self.prefix) for group in range(self.num_groups))
        return [system + prompt for prompt in own for _ in range(self.group_size)]


CASES = (
    Case(num_groups=1, group_size=32, prefix=64, goal=1.03),
    Case(num_groups=1, group_size=32, prefix=1024, goal=1.3),
    Case(num_groups=1, group_size=32, prefix=2048),
    Case(num_groups=1, group_size=32, prefix=4096, goal=1.9),
    Case(num_groups=1, group_size=32, prefix=8192),
    Case(num_groups=1, group_size=32, prefix=16384, goal=3.0),
    Case(num_groups=1, group_size=128, prefix=4096, goal=2.0),
    Case(num_groups=8, group_size=8, prefix=4096, goal=2.08),
    Case(num_groups=64, group_size=8, prefix=512, goal=1.29),
    Case(num_groups=8, group_size=8, prefix=1024, system=1024, goal=1.3),
    Case(num_groups=256, group_size=1, prefix=128, goal=1.0),
)
SPECULATED = Case(num_groups=1, group_size=32, prefix=4096)


@dataclass(frozen=True, slots=True)
class Steps:
    """Milliseconds of decode steps, neighbour by neighbour."""

    stock: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    grouped: list[bool] = field(default_factory=list)

    def gain(self) -> Ratio:
        return Pairs(a=self.stock, b=self.shared).ratio()

    def row(self, what: str, goal: float | None) -> Row:
        gain, bound = self.gain(), Pairs(a=self.stock, b=self.without).ratio()
        stock, shared = (statistics.median(arm) for arm in (self.stock, self.shared))
        left = "" if any(self.grouped) else "; left to stock"
        return Row(
            what=what,
            value=f"{gain.median:.2f}x [{gain.low:.2f}, {gain.high:.2f}]: {stock:.1f} -> "
            f"{shared:.1f} ms a step; without attention {bound.median:.2f}x{left}",
            goal=f">= {goal:.2f}x" if goal else "",
            verdict=gain.verdict(goal) if goal else "",
        )


class Engine:
    """vLLM in this process, stepped by hand."""

    def __init__(self, model: Path, cache: Path, **settings: Any) -> None:
        from vllm import LLM

        from engine.attention import installed

        installed.install(AttentionSettings(shared_prefix="auto", cache_directory=cache))
        self._llm = LLM(
            str(model),
            load_format="dummy",
            dtype="bfloat16",
            block_size=BLOCK,
            max_model_len=LONGEST + 512,
            max_num_seqs=512,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=2**30,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **settings,
        )
        core: Any = self._llm.llm_engine.engine_core
        self._client = core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        [[group]] = runner.attn_groups
        self._sharer = group.get_metadata_builder().sharer
        layers = runner.compilation_config.static_forward_context
        self._impls = [layers[name].impl for name in group.layer_names]
        self._number = 0

    def close(self) -> None:
        self._client.shutdown()

    def measure(self, case: Case, *, seconds: float, rounds: int) -> Steps:
        """At least nine rounds, then until the time is up or `rounds` were measured."""
        self._begin(case, num_tokens=3 * rounds + 30)
        steps, began = Steps(), time.perf_counter()
        self._round(Steps(), 0)
        for number in range(rounds):
            self._round(steps, number)
            if number >= 8 and time.perf_counter() - began > seconds:
                break
        self._llm.llm_engine.abort_request(self._names, internal=True)
        self._llm.llm_engine.step()
        return steps

    def _begin(self, case: Case, num_tokens: int) -> None:
        """Each prompt is computed once; then all samples are started, and are decoding."""
        from vllm import SamplingParams

        prompts = case.prompts()
        once = [{"prompt_token_ids": p} for p in prompts[:: case.group_size]]
        one = SamplingParams(max_tokens=1, detokenize=False)
        self._llm.generate(once, one, use_tqdm=False)
        many = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self._names = []
        for prompt in prompts:
            self._number += 1
            name = self._llm.llm_engine.add_request(
                str(self._number), {"prompt_token_ids": prompt}, many
            )
            self._names.append(name)
        scheduler = self._client.engine_core.scheduler
        while not (
            len(scheduler.running) == case.num_rows
            and all(r.num_output_tokens > 0 for r in scheduler.running)
        ):
            self._llm.llm_engine.step()

    def _round(self, steps: Steps, number: int) -> None:
        arms = [("off", steps.stock), ("auto", steps.shared)]
        for mode, times in arms if number % 2 == 0 else arms[::-1]:
            self._sharer.mode = mode
            before = self._num_grouped()
            times.append(self._step())
            if mode == "auto":
                steps.grouped.append(self._num_grouped() > before)
        with self._without_attention():
            steps.without.append(self._step())

    def _step(self) -> float:
        began = time.perf_counter()
        self._llm.llm_engine.step()
        return 1000 * (time.perf_counter() - began)

    def _num_grouped(self) -> int:
        from engine.attention.counts import COUNTS

        return COUNTS.steps_grouped

    @contextmanager
    def _without_attention(self) -> Iterator[None]:
        self._sharer.mode = "off"
        for impl in self._impls:
            impl.forward = lambda *_, output, **__: output
        yield
        for impl in self._impls:
            del impl.forward


class Drafts:
    """A proposer for vLLM's `custom_class`: the same draft for every sample, mostly rejected."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_speculative_tokens = DRAFTED

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[7] * DRAFTED if tokens else [] for tokens in sampled_token_ids]

    def load_model(self, *_: Any, **__: Any) -> None:
        pass


def _tokens(seed: int, length: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(5, VOCAB, LONGEST)[:length].tolist()
    return drawn


def planning_row() -> Row:
    """256 rows of 4096 tokens, as groups of eight behind a prompt of their own."""
    from engine.attention.planner import Planner

    groups, size, shared, own = 32, 8, 127, 3
    ids = np.random.default_rng(0).permutation(groups * (shared + size * own)).astype(np.int32)
    prompts = ids[: groups * shared].reshape(groups, shared).repeat(size, axis=0)
    rows = np.hstack([prompts, ids[groups * shared :].reshape(groups * size, own)])
    table = np.zeros((len(rows), 544), np.int32)
    table[:, : rows.shape[1]] = np.random.default_rng(1).permutation(rows)
    positions = np.full(len(rows), 4096, np.int32)
    anew: list[float] = []
    same: list[float] = []
    kept = Planner(BLOCK)
    for _ in range(200):
        for planner, times in ((Planner(BLOCK), anew), (kept, same)):
            began = time.perf_counter()
            planner.plan(table, positions)
            times.append(1e6 * (time.perf_counter() - began))
    median = statistics.median(anew)
    return Row(
        what="planning 256 rows of 4096 tokens",
        value=f"{median:.0f} us anew, {statistics.median(same):.0f} us when nothing has changed",
        goal="<= 200 us",
        verdict="met" if median <= 200 else "missed",
    )


def measure(seconds: float, rounds: int) -> tuple[dict[str, Steps], Steps]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        engine = Engine(model, Path(folder))
        measured = {}
        for case in CASES:
            measured[case.name] = engine.measure(case, seconds=seconds, rounds=rounds)
            print(measured[case.name].row(case.name, case.goal), flush=True)
        engine.close()
        drafting = {"method": "custom_class", "model": "bench.shared_prefix.Drafts"}
        engine = Engine(
            model, Path(folder), speculative_config=drafting | {"num_speculative_tokens": DRAFTED}
        )
        speculated = engine.measure(SPECULATED, seconds=seconds, rounds=rounds)
        engine.close()
    return measured, speculated


def record(measured: dict[str, Steps], speculated: Steps) -> Record:
    rows = [measured[case.name].row(case.name, case.goal) for case in CASES]
    alike = measured[SPECULATED.name].gain().median
    what = f"{SPECULATED.name}, {1 + DRAFTED} query tokens a sample"
    ends = [
        measured[case.name]
        for case in CASES
        if (case.num_groups, case.group_size) == (1, 32) and case.prefix in (1024, LONGEST)
    ]
    return Record(
        name="shared_prefix",
        claim="Decode steps with shared prefixes read once, against vLLM's own attention over the "
        "same cache: 25M parameters in bfloat16, block size 32.",
        rows=[
            *rows,
            speculated.row(what, alike),
            kept_row("stock", [steps.stock for steps in ends]),
            kept_row("shared", [steps.shared for steps in ends]),
            planning_row(),
        ],
        raw={
            name: {"stock": s.stock, "shared": s.shared, "without": s.without}
            for name, s in (measured | {what: speculated}).items()
        },
    )


def kept_row(arm: str, ends: list[list[float]]) -> Row:
    short, long = map(statistics.median, ends)
    return Row(
        what=f"throughput of 32 samples kept from a 1K to a 16K prefix, {arm}",
        value=f"{100 * short / long:.0f} %",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=4.0, help="a case, once nine rounds ran")
    arguments = parser.parse_args()
    if not started_by_coppice():
        with (
            tempfile.TemporaryDirectory() as scratch,
            spawning(
                EngineSettings(),
                attention=AttentionSettings(),
                on_cpu=True,
                scratch=Path(scratch),
            ),
        ):
            command = [sys.executable, "-m", "bench.shared_prefix", *sys.argv[1:]]
            raise SystemExit(os.spawnv(os.P_WAIT, sys.executable, command))
    result = record(*measure(arguments.seconds, arguments.rounds))
    result.show()
    print(f"\nwrote {result.write().name}")


if __name__ == "__main__":
    main()
