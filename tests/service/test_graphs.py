"""`coppice graphs plan`, and the metrics of captured CUDA graphs."""

import json
import re
from pathlib import Path

import pytest

from engine.cudagraphs.shapes import Trace, decode, mixed
from engine.types.feature_stats import CudaGraphStats
from service.observability.metrics import Metrics
from tests.service.command_line import Result, run_command

LIMITS = ("--engine.max-sequences", "256", "--engine.max-batched-tokens", "2048")
TIERED = ("--graphs.lengths", "8:0,2,4 32:0,2 0")


def plan(*arguments: str) -> Result:
    return run_command("graphs", "plan", *arguments)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"coppice_{name}", labels)


def rows(text: str) -> dict[str, list[str]]:
    return {line.split("  ")[0]: re.split(r"  +", line) for line in text.splitlines() if line}


def test_plan_is_printed_next_to_the_vllm_default() -> None:
    printed = plan(*TIERED, *LIMITS, "--graphs.budget-bytes", "100000000")
    assert printed.exit_code == 0
    table = rows(printed.stdout)
    assert table["2"][2].startswith("32 ") and table["4"][2].startswith("8 ")
    vllm_shapes, ours = table["vLLM 0.32: every size, every draft length"], table["this plan"]
    assert int(ours[1]) < int(vllm_shapes[1])
    assert float(ours[3]) < 0.4
    assert ours[4] == "1.0000" > vllm_shapes[4]


def test_plan_is_evaluated_on_the_steps_of_a_trace(tmp_path: Path) -> None:
    Trace(((decode(20, 3), 90), (decode(40, 3), 10), (mixed(64), 50))).write(tmp_path / "t.json")
    printed = plan(*TIERED, "--graphs.trace", str(tmp_path / "t.json"))
    assert rows(printed.stdout)["this plan"][4] == "0.9000"


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--graphs.budget-bytes", "2000000"], 1, "graphs.budget_bytes: at least"),
        (["--graphs.lengths", "4:1"], 2, "must be written as"),
        (["--graphs.trace", "/nowhere.json"], 1, "graphs.trace: /nowhere.json: No such file"),
        (["--model", "/nowhere"], 1, "the model directory /nowhere does not exist"),
    ],
)
def test_invalid_plan_request_prints_one_line(arguments: list[str], code: int, reason: str) -> None:
    printed = plan(*arguments)
    assert printed.exit_code == code
    assert len(printed.stderr.splitlines()) == 1 and reason in printed.stderr


def test_model_without_sizes_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    printed = plan("--model", str(tmp_path))
    assert printed.exit_code == 1 and "cannot estimate graph memory" in printed.stderr


def test_plan_needs_no_model_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert plan("--model", str(tmp_path)).exit_code == 0


def test_step_counts_are_added_to_earlier_ones() -> None:
    metrics = Metrics()
    assert value(metrics, "graph_steps_total", outcome="hit") == 0
    metrics.graphs.update(CudaGraphStats(num_graphs=9, measured_bytes=7, hits=10, mixed=2))
    misses = {(64, 3): 4, (8, 0): 1}
    metrics.graphs.update(
        CudaGraphStats(num_graphs=9, measured_bytes=7, hits=15, mixed=2, misses=misses)
    )
    metrics.graphs.update(
        CudaGraphStats(num_graphs=9, measured_bytes=7, hits=15, mixed=3, misses=misses)
    )
    assert value(metrics, "graphs") == 9
    assert value(metrics, "graph_bytes", kind="measured") == 7
    steps = {o: value(metrics, "graph_steps_total", outcome=o) for o in ("hit", "miss", "mixed")}
    assert steps == {"hit": 15, "miss": 5, "mixed": 3}
    assert value(metrics, "graph_misses_total", samples="64", tokens="3") == 4
    assert value(metrics, "graph_misses_total", samples="8", tokens="uneven") == 1


def test_draft_lengths_default_to_those_of_the_drafter() -> None:
    drafter = ("--speculation.mode", "drafter", "--speculation.longest-draft", "4")
    table = rows(plan(*drafter, "--graphs.budget-bytes", "150000000").stdout)
    assert {"0", "1", "2", "4"} <= table.keys()
    assert table["4"][2].split()[0] == "32"
