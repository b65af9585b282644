"""A GPU of the tests: tensors, kernels and clock of Model Runner V2, and a model, on CPU.

The kernels have the signatures and results of the Triton kernels in vLLM's
v1/worker/gpu/input_batch.py.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NextToken = Callable[[str, Sequence[int]], int]
"""The model: the token that follows a context in a named request."""


class DeviceTensor:
    """vLLM's `StagedWriteTensor`, with writes that take effect at once."""

    def __init__(self, size: Any, dtype: torch.dtype, **_: Any) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)

    def stage_write(self, index: int, start: int, x: Sequence[int]) -> None:
        self.gpu[index, start : start + len(x)] = torch.tensor(x, dtype=self.gpu.dtype)

    def stage_write_elem(self, index: int, x: int) -> None:
        self.gpu[index] = x

    def apply_write(self) -> None:
        """Do nothing."""


class SharedTensor:
    """vLLM's `UvaBackedTensor`: memory of the host that the GPU reads."""

    def __init__(self, size: Any, dtype: torch.dtype, **_: Any) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
        self.np = self.gpu.numpy()

    def copy_to_uva(self) -> None:
        """Do nothing."""


def prepare_prefill_inputs(
    input_ids: Any, _: Any, idx: Any, starts: Any, all_ids: Any, prefill_len: Any, computed: Any
) -> None:
    for row, index in enumerate(idx.tolist()):
        first, begin, end = int(computed[index]), int(starts[row]), int(starts[row + 1])
        if first < int(prefill_len[index]):
            input_ids[begin:end] = all_ids[index, first : first + end - begin]


def prepare_pos_seq_lens(idx: Any, starts: Any, computed: Any, pos: Any, seq_lens: Any) -> None:
    for row, index in enumerate(idx.tolist()):
        first, begin, end = int(computed[index]), int(starts[row]), int(starts[row + 1])
        pos[begin:end] = torch.arange(first, first + end - begin)
        seq_lens[row] = first + end - begin


def combine_sampled_and_draft_tokens(
    input_ids: Any,
    idx: Any,
    last_sampled: Any,
    starts: Any,
    seq_lens: Any,
    prefill_len: Any,
    draft_tokens: Any,
    cu_num_logits: Any,
    num_logits: int,
    *_: Any,
) -> torch.Tensor:
    indices: list[int] = []
    for row, index in enumerate(idx.tolist()):
        number, end = int(cu_num_logits[row + 1] - cu_num_logits[row]), int(starts[row + 1])
        indices += range(end - number, end)
        if int(seq_lens[row]) <= int(prefill_len[index]):
            continue
        if int(seq_lens[row]) - number >= int(prefill_len[index]):
            input_ids[end - number] = last_sampled[index, 0]
        input_ids[end - number + 1 : end] = draft_tokens[index, : number - 1]
    assert len(indices) == num_logits
    return torch.tensor(indices)


def expand_idx_mapping(idx: Any, total: int, cu_num_logits: Any, _: int) -> Any:
    counts = cu_num_logits.diff()
    assert int(counts.sum()) == total
    local = torch.cat([torch.arange(int(count)) for count in counts])
    return idx.repeat_interleave(counts), local


def post_update(
    idx: Any,
    computed: Any,
    last_sampled: Any,
    _: Any,
    sampled: Any,
    num_sampled: Any,
    num_rejected: Any,
    starts: Any,
    all_ids: Any,
    total_len: Any,
) -> None:
    for row, index in enumerate(idx.tolist()):
        number, length = int(num_sampled[row]), int(total_len[index])
        all_ids[index, length : length + number] = sampled[row, :number]
        total_len[index] += number
        if number:
            last_sampled[index] = sampled[row, number - 1]
        computed[index] += int(starts[row + 1] - starts[row]) - int(num_rejected[row])


KERNELS = (
    prepare_prefill_inputs,
    prepare_pos_seq_lens,
    combine_sampled_and_draft_tokens,
    expand_idx_mapping,
    post_update,
)


@dataclass
class Clock:
    """Time of the host and of a GPU that runs one step after the other."""

    now: float = 1.0
    gpu_free: float = 0.0

    def __call__(self) -> float:
        return self.now

    def launch(self, seconds: float) -> float:
        """Time at which a step that is launched now ends."""
        self.gpu_free = max(self.gpu_free, self.now) + seconds
        return self.gpu_free


class Result(Future[Any]):
    """Result of a step; fetching it waits until the GPU has finished the step."""

    def __init__(self, value: Any, clock: Clock, ready: float) -> None:
        super().__init__()
        self.set_result(value)
        self._clock, self._ready = clock, ready

    def result(self, timeout: float | None = None) -> Any:
        self._clock.now = max(self._clock.now, self._ready)
        return super().result(timeout)


def step_seconds(num_tokens: int) -> float:
    return 0.01 + 0.001 * num_tokens


def text_model(*, surprise: float = 0.05) -> NextToken:
    """A model whose requests generate the same text, except for random single tokens."""

    def next_token(name: str, context: Sequence[int]) -> int:
        position = len(context)
        random = np.random.default_rng([position, *name.encode()])
        if random.random() < surprise:
            return int(random.integers(200, 240))
        return (position * position + 7 * position) % 97 + 1 + 100 * (context[-1] == 230)

    return next_token
