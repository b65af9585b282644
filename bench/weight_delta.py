"""Benchmark: bytes of weight updates sent as deltas of the previous step, in a GRPO run.

The run is that of `make demo`: a served seedling with new weights in every step, sent by the client
as deltas. The server's count of received bytes is compared with the size of deltas of whole tensors
from the same files. Nothing is timed.

    python -m bench.weight_delta [--steps 12]
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from bench.harness.record import Record, Row, add_out
from coppice import Rollouts
from coppice.safetensors_io import TensorEntry, read_exactly, read_header
from coppice.weights.delta import Lineage, apply_delta, block_spans
from coppice.weights.delta_writer import write_delta
from examples.grpo.learner import Learner
from examples.grpo.loop import Loop
from examples.grpo.questions import Questions
from examples.grpo.server import serving
from examples.seedling.enlarge import SEEDLING

LEARNING_RATES = {1e-4: "the demonstration's", 1e-6: "usual for large models"}
SEED = 1
Bits = NDArray[np.uint16]
EMPTY_LINEAGE = Lineage("0" * 64, "0" * 64)


class Recording(Learner):
    """Learner that also saves the weights of every training step in a directory."""

    def __init__(self, learning_rate: float, folder: Path) -> None:
        super().__init__(learning_rate)
        self._folder = folder
        self.files: list[Path] = []

    def weights(self) -> dict[str, Tensor]:
        weights = super().weights()
        self.files.append(self._folder / f"step-{len(self.files) + 1}.safetensors")
        save_file(weights, self.files[-1])
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Sizes and changes of the weights between two consecutive training steps."""

    num_bytes: int
    received_bytes: int
    whole_tensors_bytes: int
    values_changed: float


def run(learning_rate: float, steps: int, folder: Path) -> list[Pair]:
    """Run training steps; returns the sizes of each weight update but the first.

    The first weights are sent whole, since the client has no base for a delta.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // 2))
    torch.manual_seed(SEED)
    words = AutoTokenizer.from_pretrained(SEEDLING)
    learner, received = Recording(learning_rate, folder), []
    with (
        serving(folder, cpu_threads=max(1, cores - cores // 2), seed=SEED) as url,
        Rollouts(url) as rollouts,
    ):
        questions = Questions(words, seed=SEED, num_held_out=4)
        loop = Loop(rollouts, learner, questions, groups=16, max_tokens=128)
        for _ in loop.steps(steps):
            versions = rollouts.weights()
            active = next(v for v in versions.versions if v.version == versions.active)
            received.append(active.received_bytes)
    files = learner.files
    pairs = zip(files, files[1:], received[1:], strict=False)
    return [pair(old, new, num, folder / "delta") for old, new, num in pairs]


def pair(old: Path, new: Path, received_bytes: int, delta: Path) -> Pair:
    for _ in write_delta(old, new, EMPTY_LINEAGE, delta):
        pass
    with (delta.parent / "result").open("wb") as result:
        apply_delta(old, delta, result)
    assert Path(result.name).read_bytes() == new.read_bytes(), "not bit for bit"
    before, after = values(old), values(new)
    changed = {name: np.mean(before[name] != after[name]) for name in after}
    return Pair(
        num_bytes=new.stat().st_size,
        received_bytes=received_bytes,
        whole_tensors_bytes=sum(after[name].nbytes for name in after if changed[name]),
        values_changed=float(np.average(list(changed.values()), weights=sizes(after))),
    )


def values(path: Path) -> dict[str, Bits]:
    """Read the tensors of a file as integers with the same bits, so that they compare exactly."""
    file = read_header(path)
    return {name: _bits(path, tensor) for name, tensor in file.tensors.items()}


def _bits(path: Path, tensor: TensorEntry) -> Bits:
    with path.open("rb", buffering=0) as file:
        data = b"".join(read_exactly(file, span) for span in block_spans(tensor))
    return np.frombuffer(data, np.uint16)


def sizes(arrays: dict[str, Bits]) -> list[int]:
    return [array.size for array in arrays.values()]


def rows(learning_rate: float, label: str, pairs: Sequence[Pair]) -> list[Row]:
    def share(name: str) -> float:
        return float(mean(getattr(pair, name) / pair.num_bytes for pair in pairs))

    label = f"learning rate {learning_rate:g} ({label})"
    received = share("received_bytes")
    return [
        Row(
            what=f"{label}: delta size",
            value=f"{received:.1%} of the file, {1 / received:.1f} times smaller",
        ),
        Row(
            what=f"{label}: changed tensors, sent whole",
            value=f"{share('whole_tensors_bytes'):.1%} of the file",
        ),
        Row(
            what=f"{label}: changed values",
            value=f"{mean(pair.values_changed for pair in pairs):.1%}",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    add_out(parser)
    options = parser.parse_args()
    found, raw = [], {}
    for learning_rate, label in LEARNING_RATES.items():
        with tempfile.TemporaryDirectory() as folder:
            pairs = run(learning_rate, options.steps, Path(folder))
        found += rows(learning_rate, label, pairs)
        raw[f"{learning_rate:g}"] = [
            {"received_bytes": p.received_bytes, "num_bytes": p.num_bytes} for p in pairs
        ]
    record = Record(
        name="weight_delta",
        claim="The weights of a GRPO step in bfloat16, sent as a delta against the previous "
        "step: all parameters of the bundled model are trained.",
        rows=found,
        raw=raw,
    )
    record.show()
    record.write(options.out)


if __name__ == "__main__":
    main()
