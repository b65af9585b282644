"""Stages of `bench.gpu_evidence`: which processes measure what, and how their results are read."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TESTS: Final = "tests.gpu"
NO_TRITON: Final = "Triton runs kernels on a GPU only"
NO_TOOL: Final = "NVIDIA's tool examines kernels on a GPU"
NO_FLASH: Final = "FlashAttention and CUDA graphs exist on a GPU only"
NO_GRAPHS: Final = "CUDA graphs exist on a GPU only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Folders of a measurement: its own empty one, and that of the models."""

    folder: Path
    models: Path
    rehearse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A process that measures. `seconds` is its usual time on a GPU."""

    name: str
    arguments: Callable[[Place], Sequence[str]]
    read: Callable[[Place, str], Any]
    seconds: int
    not_on_cpu: str = ""


def read_printed(place: Place, output: str) -> Any:
    """Result that the process printed in its last line."""
    return json.loads(output.strip().splitlines()[-1])


def read_record(place: Place, output: str) -> Any:
    """Record that a benchmark wrote."""
    [file] = place.folder.glob("*.json")
    return json.loads(file.read_text())


def read_report(place: Place, output: str) -> Any:
    """Outcome of every test that did not pass, and the number of those that did."""
    [result] = [json.loads(file.read_text()) for file in place.folder.glob("*.json")]
    reasons = {
        kind: [f"{test}: {reason[-300:]}" for test, reason in result[kind].items()]
        for kind in ("failed", "skipped")
    }
    return {"passed": len(result["passed"]), **reasons}


def _host(name: str, seconds: int, not_on_cpu: str = "") -> Measurement:
    def arguments(place: Place) -> list[str]:
        return ["bench.evidence.host", name, *(["--rehearse"] if place.rehearse else [])]

    return Measurement(
        name=name, arguments=arguments, read=read_printed, seconds=seconds, not_on_cpu=not_on_cpu
    )


def _engine(name: str, seconds: int) -> Measurement:
    def arguments(place: Place) -> list[str]:
        models = ["--models", str(place.models)]
        return ["bench.evidence.engine", name, *models, *(["--rehearse"] if place.rehearse else [])]

    return Measurement(name=name, arguments=arguments, read=read_printed, seconds=seconds)


def _bench(
    name: str, options: Sequence[str], seconds: int, *, model: bool = False, not_on_cpu: str = ""
) -> Measurement:
    """A benchmark that also runs alone; `model` gives it the model of the engine measurements."""

    def arguments(place: Place) -> list[str]:
        given = ["--rounds", "2"] if place.rehearse else list(options)
        if model:
            shape = "tiny" if place.rehearse else "qwen3-1.7b"
            given += ["--model", str(place.models / shape)]
        return [f"bench.{name}", *given, "--out", str(place.folder)]

    return Measurement(
        name=name, arguments=arguments, read=read_record, seconds=seconds, not_on_cpu=not_on_cpu
    )


def _tests(name: str, file: str, seconds: int) -> Measurement:
    def arguments(place: Place) -> list[str]:
        rehearse = ["--rehearse"] if place.rehearse else []
        return [TESTS, file, "--out", str(place.folder), *rehearse]

    return Measurement(name=name, arguments=arguments, read=read_report, seconds=seconds)


# Stage 0 and the kernel tests need PyTorch only, the rest of A also vLLM, and all else its engine.
STAGES: Final[Mapping[str, Sequence[Measurement]]] = {
    "0": (
        _host("imports", 20),
        _host("bandwidth", 30),
        _host("empty-grids", 30, NO_TRITON),
    ),
    "A": (
        _tests("kernel-tests", "tests/gpu/test_kernels.py", 60),
        _tests("attention-tests", "tests/gpu/test_shared_prefix.py", 60),
        _bench("shared_prefix_gpu", ["--quick", "--rounds", "3"], 120, not_on_cpu=NO_FLASH),
        _host("kv-gather", 30, NO_TRITON),
        _host("kv-scatter", 30, NO_TRITON),
        _host("sanitizer", 60, NO_TOOL),
        _host("profile", 60, NO_TOOL),
    ),
    "B": (
        _host("vllm", 30),
        _tests("engine-tests", "tests/gpu/test_engine.py", 180),
        _tests("prompt-kv-tests", "tests/gpu/test_kv_transfer.py", 120),
        _tests("weight-transfer-tests", "tests/gpu/test_weight_transfer.py", 90),
        _tests("speculation-tests", "tests/gpu/test_speculation.py", 120),
        _tests("graph-tests", "tests/gpu/test_graphs.py", 90),
    ),
    "C1": (_engine("greedy", 100), _engine("defaults", 90), _engine("small-limits", 90)),
    "C2": (
        _engine("shared-prefix-off", 90),
        _engine("shared-prefix-always", 90),
        _engine("shared-prefix-auto", 90),
        _engine("greedy-shared", 100),
    ),
    "C3": (
        _engine("burst", 90),  # writes the model that the next one reads
        _bench("kv_export_cost", ["--rounds", "5"], 240, model=True),
        _engine("burst-on-gpu", 90),
        _bench("kv_transport", ["--rounds", "5"], 60),
    ),
    "C4": (_engine("activation", 150),),
    "C5": (
        _bench("planned_graphs_gpu", ["--rounds", "3", "--shapes", "8"], 400, not_on_cpu=NO_GRAPHS),
    ),
    "C6": (
        _engine("speculation-off", 90),
        _engine("speculation-siblings", 120),
        _engine("speculation-drafter", 150),
    ),
}
