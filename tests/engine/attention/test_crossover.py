"""The crossover calibrated at start-up decides a step as a direct measurement would."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.attention.crossover import Crossover, CrossoverTrial, StepWork, crossover

CALL, ROW, PAIR, NODE = 20e-6, 1e-6, 10e-9, 5e-6


def work(nodes: int, prefix: int, suffix: int, rows: int = 8) -> StepWork:
    return StepWork(
        num_queries=rows,
        num_nodes=nodes,
        node_tokens=nodes * prefix,
        prefix_pairs=rows * prefix,
        suffix_pairs=rows * suffix,
    )


def trial(of: StepWork) -> CrossoverTrial:
    """A simulated machine: a shared prefix costs a third, and each node a constant."""
    stock = CALL + ROW * of.num_queries + PAIR * (of.prefix_pairs + of.suffix_pairs)
    shared = CALL + ROW * of.num_queries + NODE * of.num_nodes
    return CrossoverTrial(
        work=of,
        stock_seconds=stock,
        shared_seconds=shared + PAIR * (of.prefix_pairs / 3 + of.suffix_pairs),
    )


TRIALS = [
    trial(work(nodes, prefix, suffix, rows))
    for nodes in (1, 4)
    for rows in (8, 32)
    for prefix in (32, 1024)
    for suffix in (10, 300)
]


@pytest.mark.parametrize(
    "step", [work(1, 2048, 30), work(4, 32, 30), work(2, 64, 500), work(3, 512, 5)]
)
def test_fitted_crossover_decides_unmeasured_steps(step: StepWork) -> None:
    measured = trial(step)
    is_faster = measured.shared_seconds < measured.stock_seconds
    assert Crossover.fit(TRIALS).is_faster(step) == is_faster


def test_launches_decide_where_they_take_longer_than_the_gpu() -> None:
    launched = Crossover.fit([replace(t, launch_seconds=100e-6) for t in TRIALS])
    small, large = work(1, 512, 5), work(4, 2048, 5, rows=32)
    assert Crossover.fit(TRIALS).is_faster(small) and not launched.is_faster(small)
    assert launched.is_faster(large)


def test_result_is_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "engine.attention.crossover")
    crossover(tmp_path, {"threads": 2}, Measurement())
    [line] = caplog.messages
    assert line.startswith("attention crossover measured in ")
    assert line.endswith(
        "s: sharing pays from 2 samples per prefix of 512 tokens, from 2 samples per prefix of "
        "4096 tokens"
    )


def test_fitted_costs_are_never_negative() -> None:
    """Noise could make them so; then more work would appear cheaper."""
    noisy = [
        CrossoverTrial(
            work=t.work, stock_seconds=t.stock_seconds * (1 + 0.5 * (i % 3)), shared_seconds=1e-5
        )
        for i, t in enumerate(TRIALS)
    ]
    fit = Crossover.fit(noisy)
    assert min(*fit.stock, *fit.shared) >= 0


class Measurement:
    def __init__(self, *, num_unsteady: int = 0) -> None:
        self.num_calls = 0
        self._num_unsteady = num_unsteady

    def __call__(self) -> Sequence[CrossoverTrial]:
        self.num_calls += 1
        return [replace(t, steady=i >= self._num_unsteady) for i, t in enumerate(TRIALS)]


def test_machine_is_measured_once_per_configuration(tmp_path: Path) -> None:
    measure = Measurement()
    first = crossover(tmp_path / "kept", {"threads": 2}, measure)
    assert crossover(tmp_path / "kept", {"threads": 2}, measure) == first
    assert measure.num_calls == 1
    crossover(tmp_path / "kept", {"threads": 4}, measure)
    assert measure.num_calls == 2
    kept = [json.loads(file.read_text())["of"] for file in (tmp_path / "kept").iterdir()]
    assert sorted(kept, key=str) == [{"threads": 2}, {"threads": 4}]


@pytest.mark.parametrize("text", ["", "{}", '{"costs": {"stock": 1, "shared": []}}', "[1]"])
def test_broken_cache_file_is_measured_again(tmp_path: Path, text: str) -> None:
    measure = Measurement()
    crossover(tmp_path, {"threads": 2}, measure)
    [file] = tmp_path.iterdir()
    file.write_text(text)
    crossover(tmp_path, {"threads": 2}, measure)
    crossover(tmp_path, {"threads": 2}, measure)
    assert measure.num_calls == 2


def test_unwritable_cache_directory_costs_only_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    measure = Measurement()
    for _ in range(2):
        assert crossover(tmp_path / "file" / "kept", {"threads": 2}, measure)
    assert measure.num_calls == 2


def test_measurement_on_a_busy_machine_is_used_and_not_cached(tmp_path: Path) -> None:
    steady, busy = Measurement(num_unsteady=2), Measurement(num_unsteady=len(TRIALS) // 2)
    assert crossover(tmp_path, {"threads": 2}, busy).is_faster(work(1, 2048, 30))
    assert not list(tmp_path.iterdir())
    crossover(tmp_path, {"threads": 2}, steady)
    assert len(list(tmp_path.iterdir())) == 1
