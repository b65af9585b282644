"""Tensors that are read from a checkpoint's file when their values are needed."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointRefused
from engine.weights import file_tensor
from engine.weights.checkpoint import Checkpoint, read_checkpoint
from engine.weights.file_tensor import FileTensor, WeightsReader

VALUES = {
    "experts": torch.arange(4 * 6 * 64, dtype=torch.float32).reshape(4, 6, 64),
    "gain": torch.arange(64, dtype=torch.float32).to(torch.bfloat16),
    "scale": torch.tensor(3.5),
    "weight": torch.arange(48 * 1024, dtype=torch.float32).reshape(48, 1024),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file(VALUES, tmp_path / "model.safetensors")
    return read_checkpoint(tmp_path)


def sharding_reader() -> WeightsReader:
    return WeightsReader(pinned=False, reads_all=False)


def random_view(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """A view as the weight loaders of vLLM take it: narrowed, split, transposed or selected."""
    dim = draw.randrange(tensor.dim())
    start = draw.randrange(tensor.shape[dim])
    steps = [
        lambda: tensor.narrow(dim, start, draw.randint(1, tensor.shape[dim] - start)),
        lambda: tensor.transpose(dim, -1),
        lambda: tensor.select(dim, start) if tensor.dim() > 1 else tensor,
        lambda: tensor.unsqueeze(dim),
        lambda: draw.choice(tensor.chunk(2, dim)),
        lambda: tensor.permute(*draw.sample(range(tensor.dim()), tensor.dim())),
        lambda: tensor[..., :: draw.choice((1, 2))],
        lambda: tensor.data,
    ]
    return draw.choice(steps)()


@pytest.mark.parametrize("seed", range(40))
def test_views_have_the_values_of_the_whole_tensor(checkpoint: Checkpoint, seed: int) -> None:
    with sharding_reader().open(checkpoint) as tensors:
        for name, tensor in tensors:
            expected = VALUES[name]
            tensor, draws = tensor, (random.Random(seed), random.Random(seed))
            for _ in range(expected.dim() and 4):
                tensor, expected = random_view(tensor, draws[0]), random_view(expected, draws[1])
            assert isinstance(tensor, FileTensor)
            assert tensor.shape == expected.shape and tensor.stride() == expected.stride()
            copied = torch.empty_like(expected).copy_(tensor)
            assert torch.equal(copied, expected)


def test_only_the_used_part_is_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = []

    def read_ranges(stored: Any, starts: list[int], buffer: memoryview) -> None:
        num_read.append(len(buffer))

    monkeypatch.setattr(file_tensor, "read_ranges", read_ranges)
    reader = sharding_reader()
    with reader.open(checkpoint) as tensors:
        by_name = dict(tensors)
        assert num_read == [], "nothing is read before a value is needed"
        torch.empty(12, 1024).copy_(by_name["weight"].narrow(0, 12, 12))  # a column-parallel shard
        torch.empty(48, 512).copy_(by_name["weight"].narrow(1, 512, 512))  # a row-parallel shard
        torch.empty(6, 64).copy_(by_name["experts"][2])
    assert num_read == [12 * 1024 * 4, 48 * 512 * 4, 6 * 64 * 4]
    assert reader.num_bytes == sum(num_read)


def test_copy_to_a_meta_tensor_starts_the_read(checkpoint: Checkpoint) -> None:
    with sharding_reader().open(checkpoint) as tensors:
        weight = dict(tensors)["weight"].narrow(0, 0, 8)
        counted = torch.empty(8, 1024, device="meta").copy_(weight)
        assert counted.is_meta and isinstance(weight, FileTensor)
        [read] = weight.source._reads.values()
        assert torch.equal(read.result(), VALUES["weight"][:8])


def test_next_load_reads_the_views_of_the_last_one_ahead(checkpoint: Checkpoint) -> None:
    reader = sharding_reader()
    for _ in range(2):
        with reader.open(checkpoint) as tensors:
            ahead = []
            for _, tensor in tensors:
                assert isinstance(tensor, FileTensor)
                ahead += [view.shape for view in tensor.source._reads]
                if tensor.dim() == 2:
                    tensor.narrow(0, 0, 4).clone()
    assert ahead == [(4, 1024)]


def test_whole_tensors_are_read_ahead(checkpoint: Checkpoint) -> None:
    with WeightsReader(pinned=False, reads_all=True).open(checkpoint) as tensors:
        for name, tensor in tensors:
            assert isinstance(tensor, FileTensor)
            assert [view.shape for view in tensor.source._reads] == [VALUES[name].shape]


def test_arithmetic_reads_the_values(checkpoint: Checkpoint) -> None:
    with sharding_reader().open(checkpoint) as tensors:
        by_name = dict(tensors)
        assert by_name["scale"].item() == 3.5
        assert torch.equal(by_name["gain"].float() + 1, VALUES["gain"].float() + 1)
        assert torch.equal(torch.cat([by_name["weight"]] * 2), VALUES["weight"].repeat(2, 1))


def test_read_error_reaches_the_caller(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with (
        sharding_reader().open(checkpoint) as tensors,
        pytest.raises(CheckpointRefused, match="ends within"),
    ):
        dict(tensors)["weight"].clone()


def test_abandoned_reads_end(checkpoint: Checkpoint) -> None:
    with WeightsReader(pinned=False, reads_all=True).open(checkpoint) as tensors:
        next(tensors)
    assert not any(thread.name.startswith("read-weights") for thread in threading.enumerate())
