"""Step times of an engine without speculation: the baseline that drafts are compared with.

Steps without drafts of an engine that can draft are no such baseline: the draft model takes KV
cache, and on CPU it runs in these steps too. The baseline is measured once per card, model and
version of vLLM, with the batches of the profile, and cached in a file:

- by `coppice measure-baseline`, which starts the engine without speculation, or else
- at the first start with Model Runner V2, before drafting begins. There a step without drafts runs
  no draft model and no other code for drafts.

Within an engine, drafts compete with that engine's own steps without drafts, so the controller
chooses lengths by those. The baseline decides what drafting as a whole is worth: the reported gain,
and whether to draft at all.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform

from engine.attention import register as attention
from engine.attention.crossover import CacheKey
from engine.speculation.cost import (
    CONTEXT_BUCKET,
    MIN_SPEEDUP,
    ProfileCache,
    Step,
    best_speedup,
)
from engine.speculation.process_settings import settings


def engine_key(config: Any) -> CacheKey:
    """All inputs that the times of steps without drafts depend on.

    The device is the name of the card. vLLM reads it without a CUDA context, which EngineCore must
    not create.
    """
    model = config.model_config.hf_config.to_json_string().encode()
    return {
        "model": hashlib.sha256(model).hexdigest(),
        "dtype": str(config.model_config.dtype),
        "quantization": str(config.model_config.quantization),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "device": current_platform.get_device_name(),
        "ranks": int(config.parallel_config.world_size),
        "threads": _threads(config),
        "eager": str(config.model_config.enforce_eager),
        "rows": int(config.scheduler_config.max_num_seqs),
        "context": int(config.model_config.max_model_len) - int(config.num_speculative_tokens),
        "shared_prefix": attention.settings().shared_prefix,
        "vllm": vllm_version,
    }


def _threads(config: Any) -> str:
    """CPU threads of a rank. With several ranks only the workers have vLLM's number of threads."""
    if config.parallel_config.world_size == 1:
        return str(torch.get_num_threads())
    return os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")


def baseline_cache(config: Any) -> ProfileCache:
    return ProfileCache(settings().cache_directory, engine_key(config) | {"speculation": "off"})


def measured_overhead(config: Any, steps: Sequence[Step]) -> float:
    """Overhead of an engine with these step times; 1 if there is no baseline."""
    return overhead_ratio(steps, baseline_cache(config).read() or ())


def overhead_ratio(steps: Sequence[Step], baseline: Sequence[Step]) -> float:
    """Time of an engine's steps without drafts relative to the baseline, as a geometric mean.

    It is taken over the batches that both have measured, and is 1 if there are none.
    """
    own, base = _times_without_drafts(steps), _times_without_drafts(baseline)
    ratios = [np.mean(own[batch]) / np.mean(base[batch]) for batch in own.keys() & base.keys()]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0


def _times_without_drafts(steps: Sequence[Step]) -> dict[tuple[int, int], list[float]]:
    """Times by number of rows and bucket of context."""
    times = defaultdict(list)
    for step in steps:
        if step.verified == step.running:
            times[step.running, step.context // step.running // CONTEXT_BUCKET].append(step.seconds)
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class GainPrediction:
    """Upper bound of the gain of drafts, from step times measured at the start.

    `best_speedup` is the speed of a single sample with all drafts accepted, divided by its speed in
    an engine without speculation. `overhead` is the time of a step without drafts, divided by that
    of such an engine.
    """

    best_speedup: float
    overhead: float

    @property
    def is_loss(self) -> bool:
        return self.best_speedup < MIN_SPEEDUP

    def __str__(self) -> str:
        return (
            f"as measured, a single sample with perfect drafts is {self.best_speedup:.2f} times as "
            f"fast as without speculation, and {MIN_SPEEDUP} times is required"
        )


def predict_gain(
    steps: Sequence[Step] | None, baseline: Sequence[Step] | None, max_draft_tokens: int
) -> GainPrediction | None:
    """Prediction from a profile of an engine; None if nothing was measured."""
    if not steps:
        return None
    overhead = overhead_ratio(steps, baseline or ())
    return GainPrediction(
        best_speedup=best_speedup(steps, max_draft_tokens) / overhead, overhead=overhead
    )
