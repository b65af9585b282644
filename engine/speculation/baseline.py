"""Measured step times without speculation, cached on disk, and predicted gain of drafts.

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
from engine.runtime.process_environment import cache_directory
from engine.speculation.cost import (
    CONTEXT_BUCKET,
    MIN_SPEEDUP,
    ProfileCache,
    Step,
    StepCostModel,
    best_speedup,
)
from engine.speculation.settings import process_settings


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
    return ProfileCache(cache_directory("speculation"), engine_key(config) | {"speculation": "off"})


def profile_cache(config: Any) -> ProfileCache:
    return ProfileCache(cache_directory("speculation"), profile_key(config))


def profile_key(config: Any) -> CacheKey:
    """All inputs that the times of an engine's steps with drafts depend on."""
    return engine_key(config) | {
        "max_draft_tokens": int(config.speculative_config.num_speculative_tokens),
        "async_scheduling": str(config.scheduler_config.async_scheduling),
    }


def cost_model(config: Any, steps: Sequence[Step]) -> StepCostModel:
    """Cost model of an engine with these step times; without a baseline its overhead is 1."""
    overhead = overhead_ratio(steps, baseline_cache(config).read() or ())
    return StepCostModel(steps, overhead=1.0 if overhead is None else overhead)


def overhead_ratio(
    steps: Sequence[Step], baseline: Sequence[Step], *, num_rows: int | None = None
) -> float | None:
    """Time of an engine's steps without drafts relative to the baseline, as a geometric mean.

    It is taken over the batches that both have measured, or over those of `num_rows` rows, and is
    None if there are none.
    """
    own, base = _times_without_drafts(steps), _times_without_drafts(baseline)
    batches = [batch for batch in own.keys() & base.keys() if num_rows in (None, batch[0])]
    ratios = [np.mean(own[batch]) / np.mean(base[batch]) for batch in batches]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def _times_without_drafts(steps: Sequence[Step]) -> dict[tuple[int, int], list[float]]:
    """Times by number of rows and bucket of context."""
    times = defaultdict(list)
    for step in steps:
        if step.verified == step.running:
            times[step.running, step.context // step.running // CONTEXT_BUCKET].append(step.seconds)
    return times


MAX_LOSS = 0.95
"""Predicted speedup below which an explicit mode is refused. Step times vary by a few per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainPrediction:
    """Upper bound of the gain of drafts, from step times measured at the start.

    `overhead` is the time of a step without drafts, divided by that of the baseline; None if there
    is none. `best_speedup` is the speed of a single sample with all drafts accepted, divided by its
    speed in the baseline, or else in this engine without drafts.
    """

    best_speedup: float
    overhead: float | None

    @property
    def is_sufficient(self) -> bool:
        """True if the mode `auto` drafts."""
        return self.best_speedup >= MIN_SPEEDUP

    @property
    def is_loss(self) -> bool:
        """True if even perfect drafts are clearly slower than the baseline."""
        return self.best_speedup < MAX_LOSS

    def __str__(self) -> str:
        speed = f"a single sample with perfect drafts would run at {self.best_speedup:.2f} times"
        if self.overhead is None:
            return f"{speed} its speed without drafts; no baseline was measured"
        return (
            f"a step without drafts takes {self.overhead:.2f} times as long as in the baseline, an "
            f"engine without speculation; {speed} the baseline's speed"
        )


def predict_gain(
    steps: Sequence[Step] | None, baseline: Sequence[Step] | None, max_draft_tokens: int
) -> GainPrediction | None:
    """Prediction from a profile of an engine; None if nothing was measured."""
    if not steps:
        return None
    overhead = overhead_ratio(steps, baseline or ())
    of_one_row = overhead_ratio(steps, baseline or (), num_rows=1) or overhead or 1.0
    return GainPrediction(
        best_speedup=best_speedup(steps, max_draft_tokens) / of_one_row, overhead=overhead
    )


def may_speed_up(steps: Sequence[Step], config: Any) -> bool:
    """Return whether to draft, given measured steps: always, unless the mode is `auto`."""
    if process_settings().mode != "auto":
        return True
    prediction = predict_gain(
        steps, baseline_cache(config).read(), config.speculative_config.num_speculative_tokens
    )
    return prediction is not None and prediction.is_sufficient
