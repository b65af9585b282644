"""Memory estimates and model properties that decide how a group's backward pass is run."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coppice.train.data_parallel import is_sharded

# Fraction of the free memory; the micro-batches of the responses need the rest.
MAX_FREE_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of a model by which the backward pass of a group is scheduled.

    `reentrant`: the model uses reentrant activation checkpointing.
    """

    num_layers: int
    device: torch.device
    dtype: torch.dtype
    checkpointed: bool
    reentrant: bool
    sharded: bool

    @property
    def can_stop_early(self) -> bool:
        """True if an exception may end a forward of the model early.

        A checkpointed layer must end in the same way when it is recomputed, and the hooks of a
        sharded layer must run at its end.
        """
        return not self.checkpointed and not self.sharded

    @property
    def requires_output_backward(self) -> bool:
        """True if a backward must start at the model's outputs instead of at keys and values."""
        return self.reentrant or self.sharded


def get_model_info(model: Any) -> ModelInfo:
    checkpoints = [
        module._gradient_checkpointing_func
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False) and module.training
    ]
    parameter = next(model.parameters())
    return ModelInfo(
        num_layers=model.config.num_hidden_layers,
        device=parameter.device,
        dtype=model.dtype,
        checkpointed=bool(checkpoints),
        reentrant=any(_is_reentrant(function) for function in checkpoints),
        sharded=is_sharded(model),
    )


def _is_reentrant(function: Any) -> bool:
    """True if a checkpoint function, as transformers stores it in modules, is reentrant.

    transformers stores a functools.partial of torch's checkpoint function.
    """
    return bool(getattr(function, "keywords", {}).get("use_reentrant", True))


def graph_fits(config: Any, num_tokens: int, model_info: ModelInfo) -> bool:
    """True if memory suffices to keep a prompt's autograd graph while responses are computed."""
    free = free_bytes(model_info.device)
    return free is None or graph_bytes(config, num_tokens, model_info) <= MAX_FREE_SHARE * free


def graph_bytes(config: Any, num_tokens: int, model_info: ModelInfo) -> int:
    """Estimated size in bytes of the autograd graph of a prompt's forward.

    A checkpointed layer stores its input, keys and values.
    """
    size = model_info.dtype.itemsize
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads * head_dim
    keys = config.num_key_value_heads * head_dim
    if model_info.checkpointed:
        numbers = config.hidden_size + 2 * keys
        return int(num_tokens * model_info.num_layers * numbers * size)
    # Norms and rotary embeddings store their input and their result in float32.
    wide = 2 * config.hidden_size + queries + keys
    numbers = 5 * config.hidden_size + 4 * queries + 4 * keys + 5 * config.intermediate_size
    return int(num_tokens * model_info.num_layers * (numbers * size + wide * 4))


def free_bytes(device: torch.device) -> int | None:
    """Bytes of memory that can still be allocated on a device, or None if unknown.

    The CUDA caching allocator's unused reserve counts as available.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    machine_free_bytes = _numbers(meminfo)["MemAvailable:"] * 1024
    return min([machine_free_bytes, *cgroup_free_bytes()])


def cgroup_free_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yields how many bytes are free below a cgroup's memory limit; nothing if it has no limit.

    Reclaimable file pages count as free.
    """
    for limit, usage, stat, of_files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        with suppress(OSError, ValueError, KeyError):  # the limit is `max`, or another version
            most, used = (int((cgroup / name).read_text()) for name in (limit, usage))
            yield max(0, most - used + _numbers(cgroup / stat)[of_files])


def _numbers(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines}
