"""Workloads of the engine measurements, and an engine that runs them."""

import asyncio
import random
import shutil
import subprocess
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from engine.kv_types import ExportSlot
from engine.types import Completion, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Groups of samples of one prompt each, and the tokens of prompts and responses."""

    groups: int
    samples: int
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Models and workloads of one kind of machine."""

    model: str
    drafter: str
    shared: Workload
    unshared: Workload
    burst: Workload
    reloaded: Workload
    context: int


ON_GPU: Final = Size(
    model="qwen3-1.7b",
    drafter="qwen3-drafter",
    shared=Workload(groups=16, samples=16, prompt=1024, tokens=256),
    unshared=Workload(groups=256, samples=1, prompt=128, tokens=256),
    burst=Workload(groups=32, samples=1, prompt=8192, tokens=1),
    reloaded=Workload(groups=16, samples=16, prompt=1024, tokens=1024),
    context=16384,
)
REHEARSAL: Final = Size(
    model="tiny",
    drafter="tiny-drafter",
    shared=Workload(groups=2, samples=4, prompt=96, tokens=16),
    unshared=Workload(groups=8, samples=1, prompt=32, tokens=16),
    burst=Workload(groups=4, samples=1, prompt=256, tokens=1),
    reloaded=Workload(groups=2, samples=2, prompt=64, tokens=900),
    context=1024,
)


class Run:
    """An engine under measurement. Prompts differ in every batch, so that none is cached."""

    def __init__(self, engine: VllmEngine, vocabulary: int) -> None:
        self.engine = engine
        self._vocabulary = vocabulary
        self._batch = 0

    async def batch(self, workload: Workload, **sampling: Any) -> dict[str, float]:
        """Run a workload; returns its sampled tokens per second and the seconds."""
        began = time.perf_counter()
        completions = await asyncio.gather(*await self.submit(workload, **sampling))
        seconds = time.perf_counter() - began
        tokens = sum(len(completion.token_ids) for completion in completions)
        return {"tokens_per_second": tokens / seconds, "seconds": seconds}

    async def submit(
        self,
        workload: Workload,
        *,
        slots: Sequence[ExportSlot] = (),
        **sampling: Any,
    ) -> list[Awaitable[Completion]]:
        self._batch += 1
        options = Sampling(max_tokens=workload.tokens, ignore_eos=True, **sampling)
        return await self.engine.submit(
            [
                SampleRequest(
                    id=f"{self._batch}-{group}-{number}",
                    prompt_token_ids=prompt,
                    sampling=options,
                    group=f"{self._batch}-{group}",
                    export=slots[group] if slots and number == 0 else None,
                )
                for group, prompt in enumerate(self.prompts(workload))
                for number in range(workload.samples)
            ]
        )

    def prompts(self, workload: Workload) -> list[list[int]]:
        draw = random.Random(self._batch)
        return [
            [draw.randrange(5, self._vocabulary) for _ in range(workload.prompt)]
            for _ in range(workload.groups)
        ]

    async def counters(self) -> dict[str, Any]:
        """Counters of the engine, which are read once per second, without those that are zero."""
        await asyncio.sleep(2.5)
        engine = self.engine
        graphs = asdict(engine.graphs())
        graphs["misses"] = {str(shape): count for shape, count in graphs["misses"].items()}
        return {
            "attention": _without_zeros(asdict(engine.shared_prefix())),
            "speculation": _without_zeros(asdict(engine.speculation())),
            "graphs": _without_zeros(graphs),
            "gpu_memory": _gpu_memory(),
        }


def _without_zeros(counted: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        name: _without_zeros(value) if isinstance(value, Mapping) else value
        for name, value in counted.items()
    }
    return {str(name): value for name, value in inner.items() if value}


def _gpu_memory() -> str:
    """Used memory of the GPUs, as the driver counts it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
