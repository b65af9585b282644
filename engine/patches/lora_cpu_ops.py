"""Patch of LoRA on CPU: rows without an adapter no longer get one.

https://github.com/vllm-project/vllm/pull/48421

On CPU a row without an adapter has the index -1, and vLLM's torch ops use the last adapter for it.
In a step that mixes rows with and without adapters, samples of the base model silently get an
adapter. The ops also gather a whole matrix for every row.

Here rows are processed per adapter, rows without one are skipped, and each adapter takes one matrix
product. Names and order of the arguments are vLLM's.
"""

from collections.abc import Iterator

import torch

Rows = torch.Tensor | slice


def rows_by_adapter(
    lengths: torch.Tensor, indices: torch.Tensor, batches: int
) -> Iterator[tuple[Rows, int]]:
    """Group rows by adapter: yields rows and index of each adapter, except for index -1."""
    if batches == 1:
        runs: list[tuple[Rows, int]] = [(slice(None), int(indices[0]))]
    else:
        per_row = torch.repeat_interleave(indices, lengths)
        runs = [
            ((per_row == index).nonzero()[:, 0], index) for index in sorted(set(indices.tolist()))
        ]
    return ((rows, index) for rows, index in runs if index >= 0)


def shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    scaling: float,
) -> None:
    """Multiply rows with their adapter's LoRA A matrix; rows without adapter keep their zeros."""
    for rows, index in rows_by_adapter(seq_len_tensor, lora_indices_tensor, batches):
        narrow = _product(inputs[rows], lora_a_weights[index], output_tensor.dtype)
        output_tensor[rows, : narrow.shape[1]] = scaling * narrow


def expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    add_inputs: bool = False,
) -> None:
    """Multiply rows with their adapter's LoRA B matrix, and add or write them to the output.

    The model's output may be less padded than the adapter's.
    """
    grouped = rows_by_adapter(seq_len_tensor, lora_indices_tensor, batches)
    width = min(lora_b_weights.shape[-2], output_tensor.shape[1])
    weights, output = lora_b_weights[..., :width, :], output_tensor[:, :width]
    _expand(inputs, weights, output, grouped, add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> None:
    part = output_tensor[:, slice_offset : slice_offset + slice_size]
    grouped = rows_by_adapter(seq_len_tensor, lora_indices_tensor, batches)
    _expand(inputs, lora_b_weights, part, grouped, add_inputs)


def _expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output: torch.Tensor,
    grouped: Iterator[tuple[Rows, int]],
    add: bool,
) -> None:
    """Multiply grouped rows with LoRA B matrices; add or write them to an output of equal width."""
    for rows, index in grouped:
        values = _product(inputs[rows], lora_b_weights[index], output.dtype)
        output[rows] = output[rows] + values if add else values


def _product(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Product of rows with a LoRA matrix [out, in], which may have a leading dimension of one."""
    return torch.nn.functional.linear(rows.to(dtype), weights.flatten(0, -2).to(dtype))


def install() -> None:
    from vllm.lora.punica_wrapper import punica_cpu

    for name, op in (
        ("sgmv_shrink", shrink),
        ("sgmv_expand", expand),
        ("sgmv_expand_slice", expand_slice),
    ):
        setattr(punica_cpu, name, op)
