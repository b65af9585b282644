"""Times decode steps of a vLLM in this process, alternating between attention backends.

Adjacent steps of the same samples use vLLM's own attention and shared-prefix attention; a third
skips attention, as a bound. The time of the attention layers is also measured: in a step without
them the other layers are faster, so two steps differ by more than the attention of one. On a
machine with other work, steps run on one thread and its processor time is measured, which other
work affects little.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness.paired_runs import Pairs, Ratio
from bench.harness.record import Row
from engine.attention.settings import AttentionSettings
from engine.runtime.process_environment import CACHE_ENV

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


def write_config(model: Path) -> Path:
    """Write the config of a model with 25M random parameters."""
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch to time: a shared system prompt, then groups of samples with a common prefix.

    `system` and `prefix` are numbers of tokens.
    """

    num_groups: int
    group_size: int
    prefix: int
    system: int = 0
    drafted: int = 0
    goal: float | None = None

    @property
    def name(self) -> str:
        groups = "group" if self.num_groups == 1 else "groups"
        system = f" after {self.system} tokens shared by all groups" if self.system else ""
        if self.group_size == 1:
            return f"{self.num_groups} different prompts of {self.prefix}"
        tokens = f", {1 + self.drafted} query tokens per sample" if self.drafted else ""
        return (
            f"{self.num_groups} {groups} of {self.group_size}, prefix {self.prefix}{system}{tokens}"
        )

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.group_size

    def prompts(self) -> list[list[int]]:
        """Prompts of all samples of the batch.

        They are drawn by group number, so a group's shorter prompts are prefixes of longer ones.
        """
        system = _tokens(10**6, self.system)
        own = (_tokens(group, self.prefix) for group in range(self.num_groups))
        return [system + prompt for prompt in own for _ in range(self.group_size)]


@dataclass(frozen=True, slots=True)
class Steps:
    """Milliseconds of decode steps by attention backend; equal indices are of the same round."""

    stock: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    stock_attention: list[float] = field(default_factory=list)
    shared_attention: list[float] = field(default_factory=list)
    grouped: list[bool] = field(default_factory=list)

    def speedup(self) -> Ratio:
        return Pairs(a=self.stock, b=self.shared).ratio()

    def row(self, what: str, goal: float | None) -> Row:
        speedup, bound = self.speedup(), Pairs(a=self.stock, b=self.without).ratio()
        stock, shared = (statistics.median(arm) for arm in (self.stock, self.shared))
        left = "" if any(self.grouped) else "; falls back to vLLM's attention"
        attention = [self.stock_attention, self.shared_attention]
        if all(attention):
            stock_part, shared_part = (statistics.median(arm) for arm in attention)
            left = f"; attention layers {stock_part:.1f} -> {shared_part:.1f} ms{left}"
        return Row(
            what=what,
            value=f"{speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]: {stock:.1f} -> "
            f"{shared:.1f} ms per step; without attention {bound.median:.2f}x{left}",
            goal=f">= {goal:.2f}x" if goal else "",
            verdict=speedup.verdict(goal) if goal else "",
        )


class Engine:
    """vLLM in this process, stepped and timed by the benchmark."""

    def __init__(self, model: Path, cache: Path, *, alone: bool, **settings: Any) -> None:
        from vllm import LLM

        from engine.attention import register

        os.environ[CACHE_ENV] = str(cache)
        register.install(AttentionSettings(shared_prefix="auto"))
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
        self._grouper = group.get_metadata_builder().grouper
        layers = runner.compilation_config.static_forward_context
        self._impls = [layers[name].impl for name in group.layer_names]
        self._number = 0
        self._alone = alone
        self._clock = time.perf_counter if alone else time.thread_time

    def close(self) -> None:
        self._client.shutdown()

    def measure(self, case: Case, *, seconds: float, rounds: int) -> Steps:
        """Time a batch for at least nine rounds, then until the time or the rounds are used up."""
        self._begin(case, num_tokens=3 * rounds + 30)
        num_threads = torch.get_num_threads()
        if not self._alone:
            torch.set_num_threads(1)
        steps, began = Steps(), time.perf_counter()
        self._round(Steps(), 0)
        for number in range(rounds):
            self._round(steps, number)
            if number >= 8 and time.perf_counter() - began > seconds:
                break
        torch.set_num_threads(num_threads)
        self._llm.llm_engine.abort_request(self._names, internal=True)
        self._llm.llm_engine.step()
        return steps

    def _begin(self, case: Case, num_tokens: int) -> None:
        """Start all samples of a batch and step until each of them decodes.

        Each prompt is prefilled once before.
        """
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
        arms = [
            ("off", steps.stock, steps.stock_attention),
            ("auto", steps.shared, steps.shared_attention),
        ]
        for mode, times, attention_times in arms if number % 2 == 0 else arms[::-1]:
            self._grouper.mode = mode
            before = self._count_grouped_steps()
            with timed_layers(self._impls, self._clock, attention_times):
                times.append(self._step())
            if mode == "auto":
                steps.grouped.append(self._count_grouped_steps() > before)
        with self._without_attention():
            steps.without.append(self._step())

    def _step(self) -> float:
        began = self._clock()
        self._llm.llm_engine.step()
        return 1000 * (self._clock() - began)

    def _count_grouped_steps(self) -> int:
        from engine.attention.counters import COUNTERS

        return COUNTERS.steps_grouped

    @contextmanager
    def _without_attention(self) -> Iterator[None]:
        self._grouper.mode = "off"
        for impl in self._impls:
            impl.forward = lambda *_, output, **__: output.zero_()
        yield
        for impl in self._impls:
            del impl.forward


@contextmanager
def timed_layers(
    impls: Sequence[Any], clock: Callable[[], float], times: list[float]
) -> Iterator[None]:
    """Context manager that appends the milliseconds of all attention layers in it together."""
    layer_seconds: list[float] = []
    for impl in impls:
        impl.forward = _timed(impl.forward, clock, layer_seconds)
    try:
        yield
    finally:
        for impl in impls:
            del impl.forward
    times.append(1000 * sum(layer_seconds))


def _timed(
    run: Callable[..., Any], clock: Callable[[], float], seconds: list[float]
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = clock()
        result = run(*args, **kwargs)
        seconds.append(clock() - began)
        return result

    return timed


class Drafts:
    """Proposer for vLLM's `custom_class` with a constant draft, which is mostly rejected."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_speculative_tokens = DRAFTED

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[7] * DRAFTED if tokens else [] for tokens in sampled_token_ids]

    def load_model(self, *_: Any, **__: Any) -> None:
        pass


def _tokens(seed: int, length: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(5, VOCAB, LONGEST)[:length].tolist()
    return drawn
