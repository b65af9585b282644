"""The measurement of the crossover on a GPU, with a reference implementation of FlashAttention."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.crossover import BatchShape
from kernels.shared_prefix_attention import cuda
from tests.kernels.flash_attention import flash_attn_varlen_func

# Importing vLLM without a GPU emits unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SHAPE = BatchShape(num_groups=2, group_size=3, prefix_blocks=2, suffix_tokens=20)


def scheduler_metadata(**named: Any) -> torch.Tensor:
    """FlashAttention 3's schedule: here the arguments that must agree with those of the call."""
    lens = [named["batch_size"], named["max_seqlen_q"], named["max_seqlen_k"]]
    return torch.tensor([*lens, named["causal"]])


def checked_flash(*, scheduler_metadata: torch.Tensor, **named: Any) -> Any:
    expected = [len(named["seqused_k"]), named["max_seqlen_q"], named["max_seqlen_k"]]
    assert scheduler_metadata.tolist() == [*expected, named["causal"]]
    return flash_attn_varlen_func(**named)


def wall_times(call: Callable[[], object]) -> list[float]:
    began = time.perf_counter()
    call()
    return [time.perf_counter() - began]


def calibration_step() -> Any:
    from engine.attention.cuda_calibration import CalibrationStep, LayerGeometry

    geometry = LayerGeometry(
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        block_size=16,
        dtype=torch.bfloat16,
        fa_version=3,
    )
    flash = SimpleNamespace(
        flash_attn_varlen_func=checked_flash, get_scheduler_metadata=scheduler_metadata
    )
    lens = np.full(SHAPE.num_rows, 52, np.int32)
    return CalibrationStep(geometry, SHAPE.block_table(16), lens, torch.device("cpu"), flash)


def test_both_arms_compute_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.attention.second_runner import merge

    monkeypatch.setattr(cuda, "merge", merge)
    step = calibration_step()
    generator = torch.Generator().manual_seed(0)
    for tensor in (step._query, step.cache):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    step.stock_call()()
    expected = step.out.clone()
    step.out.fill_(torch.nan)
    step.shared_call()()
    torch.testing.assert_close(step.out, expected, atol=2e-2, rtol=0)


def test_trial_counts_the_work_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.attention.second_runner import merge

    monkeypatch.setattr(cuda, "merge", merge)
    trial = calibration_step().trial(wall_times, wall_times)
    work = trial.work
    assert (work.num_queries, work.num_nodes, work.node_tokens) == (6, 2, 64)
    assert (work.prefix_pairs, work.suffix_pairs) == (6 * 32, 6 * 20)
    assert trial.stock_seconds > 0 and trial.shared_seconds > 0


def test_unsteady_trial_is_repeated_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.attention import cuda_calibration
    from tests.engine.attention.second_runner import merge

    monkeypatch.setattr(cuda, "merge", merge)
    times = iter([[1.0, 5.0, 5.0], [1.0], [1.0], [1.0, 9.0, 9.0], *[[2.0]] * 4])
    monkeypatch.setattr(cuda_calibration, "graph_times", lambda _: next(times))
    monkeypatch.setattr(cuda_calibration, "launch_times", lambda _: [3.0])
    trial = cuda_calibration._trial(calibration_step())
    assert (trial.stock_seconds, trial.shared_seconds, trial.launch_seconds) == (2.0, 2.0, 3.0)
    assert trial.steady and len(list(times)) == 2


def test_gpu_times_are_those_of_a_cold_cache_without_the_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated: 40 us to write the L2 cache, 5 us or 9 us for the call, if it is warm or cold."""
    from engine.attention import cuda_timing

    size = SimpleNamespace(L2_cache_size=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: size)
    monkeypatch.setattr(torch, "empty", lambda number, **_: Written(number))

    def replay_times(calls: list[Callable[[], object]]) -> list[float]:
        sizes = [call() for call in calls * 2]
        flushes = [size for size in sizes if size is not None]
        assert set(flushes) == {2000}
        return [40e-6 * len(flushes) / 2 + (9e-6 if None in sizes else 0), 60e-6]

    monkeypatch.setattr(cuda_timing, "replay_times", replay_times)
    assert cuda_timing.graph_times(lambda: None) == pytest.approx([9e-6, 20e-6])


class Written:
    def __init__(self, number: int) -> None:
        self._number = number

    def fill_(self, _: int) -> int:
        return self._number
