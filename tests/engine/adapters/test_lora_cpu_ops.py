"""The patched LoRA ops equal plain products per row; vLLM's own fail on rows without an adapter."""

from typing import Any

import pytest
import torch

from engine.patches import lora_cpu_ops

RUNS = {
    "one adapter": ([5], [1]),
    "none": ([4], [-1]),
    "some rows without": ([2, 3, 1], [-1, 0, -1]),
    "two adapters, one twice": ([1, 2, 3, 2], [1, 0, -1, 1]),
}
every_mix = pytest.mark.parametrize(("lengths", "indices"), RUNS.values(), ids=RUNS)
RANK, INNER, OUT = 4, 6, 10


def metadata(lengths: list[int], indices: list[int]) -> dict[str, Any]:
    """Metadata as vLLM's wrapper passes it."""
    sizes = torch.tensor(lengths)
    return {
        "b_seq_start_loc": torch.cumsum(sizes, 0) - sizes,
        "seq_len_tensor": sizes,
        "lora_indices_tensor": torch.tensor(indices),
        "batches": len(lengths),
        "max_seq_length": max(lengths),
        "token_nums": sum(lengths),
    }


def matrices(*shape: int) -> torch.Tensor:
    return torch.randn(2, 1, *shape)


def per_row(lengths: list[int], indices: list[int]) -> list[int]:
    return [index for length, index in zip(lengths, indices, strict=True) for _ in range(length)]


def product(rows: torch.Tensor, weights: torch.Tensor, owners: list[int]) -> torch.Tensor:
    """Zero where a row has no adapter."""
    each = [
        weights[owner, 0] @ row if owner >= 0 else torch.zeros(weights.shape[2])
        for row, owner in zip(rows, owners, strict=True)
    ]
    return torch.stack(each)


@every_mix
def test_shrink_writes_only_rows_with_an_adapter(lengths: list[int], indices: list[int]) -> None:
    rows, weights = torch.randn(sum(lengths), INNER), matrices(RANK, INNER)
    output = torch.zeros(sum(lengths), RANK)
    lora_cpu_ops.shrink(rows, weights, output, **metadata(lengths, indices), scaling=0.5)
    expected = 0.5 * product(rows, weights, per_row(lengths, indices))
    torch.testing.assert_close(output, expected)


def test_product_that_is_wider_than_its_slice_is_an_error() -> None:
    rows, weights, output = torch.randn(2, RANK), matrices(OUT, RANK), torch.zeros(2, OUT)
    place: dict[str, Any] = {"slice_offset": 0, "slice_size": OUT - 1, "add_inputs": True}
    with pytest.raises(RuntimeError):
        lora_cpu_ops.expand_slice(rows, weights, output, **metadata([2], [0]), **place)


@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expand_adds_to_a_slice_of_each_row(
    lengths: list[int], indices: list[int], dtype: torch.dtype
) -> None:
    rows, weights = torch.randn(sum(lengths), RANK), matrices(OUT, RANK)
    output = torch.randn(sum(lengths), OUT + 5).to(dtype)
    before = output.clone()
    given = metadata(lengths, indices)
    place: dict[str, Any] = {"slice_offset": 3, "slice_size": OUT, "add_inputs": True}
    lora_cpu_ops.expand_slice(rows, weights.to(dtype), output, **given, **place)
    added = product(rows.to(dtype).float(), weights.to(dtype).float(), per_row(lengths, indices))
    expected = before.float()
    expected[:, 3 : 3 + OUT] += added
    torch.testing.assert_close(
        output.float(), expected, atol=1e-5 if dtype is torch.float32 else 0.1, rtol=2e-2
    )
    untouched = torch.tensor(per_row(lengths, indices)) < 0
    assert torch.equal(output[untouched], before[untouched])


@every_mix
def test_expand_of_a_whole_row_stops_at_the_output_size(
    lengths: list[int], indices: list[int]
) -> None:
    rows, weights = torch.randn(sum(lengths), RANK), matrices(OUT, RANK)
    output = torch.zeros(sum(lengths), OUT - 2)
    lora_cpu_ops.expand(rows, weights, output, **metadata(lengths, indices), add_inputs=True)
    expected = product(rows, weights, per_row(lengths, indices))[:, : OUT - 2]
    torch.testing.assert_close(output, expected)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_vllm_applies_the_last_adapter_to_rows_without_one() -> None:
    from vllm.lora.ops.torch_ops import lora_ops

    rows, weights = torch.randn(3, INNER), matrices(RANK, INNER)
    output = torch.zeros(3, RANK)
    lora_ops.sgmv_shrink(rows, weights, output, **metadata([1, 2], [0, -1]), scaling=1.0)
    torch.testing.assert_close(output, product(rows, weights, [0, 1, 1]))
