"""The measurement of the crossover on a GPU, with a reference implementation of FlashAttention."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.crossover import BatchShape, Crossover
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


def wall_times(calls: Sequence[Callable[[], None]]) -> list[float]:
    times = []
    for call in calls:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


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
    for cache in [step._query, *step._caches]:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    for stock, shared in zip(step.stock_calls(), step.shared_calls(), strict=True):
        stock()
        expected = step.out.clone()
        step.out.fill_(torch.nan)
        shared()
        torch.testing.assert_close(step.out, expected, atol=2e-2, rtol=0)


def test_trial_counts_the_work_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.attention.second_runner import merge

    monkeypatch.setattr(cuda, "merge", merge)
    trial = calibration_step().trial(wall_times, wall_times)
    work = trial.work
    assert (work.num_queries, work.num_nodes, work.node_tokens) == (6, 2, 64)
    assert (work.prefix_pairs, work.suffix_pairs) == (6 * 32, 6 * 20)
    assert trial.stock_seconds > 0 and trial.shared_seconds > 0


class OtherRank:
    """A rank of a tensor-parallel group that receives what the first rank has measured."""

    rank_in_group = 1

    def __init__(self, received: object) -> None:
        self._received = received

    def broadcast_object(self, value: object, src: int) -> object:
        assert value is None and src == 0
        return self._received


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **_: 3)
    config = SimpleNamespace(dtype=torch.bfloat16)
    return SimpleNamespace(
        num_heads_q=4, num_heads_kv=2, headdim=64, block_size=16, model_config=config
    )


def test_ranks_use_the_costs_of_the_first(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.attention import cuda_calibration

    costs = Crossover(stock=(1.0,), shared=(2.0,))
    monkeypatch.setattr(cuda_calibration, "get_tp_group", lambda: OtherRank(costs))
    assert cuda_calibration.crossover_of(layers) is costs


def test_failed_measurement_fails_on_all_ranks(
    layers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engine.attention import cuda_calibration

    sent: list[Any] = []

    class First:
        rank_in_group = 0

        def broadcast_object(self, value: object, src: int) -> object:
            sent.append(value)
            return value

    def fail(_: object) -> Crossover:
        raise MemoryError("no room")

    monkeypatch.setattr(cuda_calibration, "_crossover", fail)
    for group in (First(), None):
        found = group or OtherRank(sent[0])
        monkeypatch.setattr(cuda_calibration, "get_tp_group", lambda found=found: found)
        with pytest.raises(RuntimeError, match="no room"):
            cuda_calibration.crossover_of(layers)
