"""Estimate of whether a prompt's graph fits in memory during the responses' micro-batches."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from coppice.train.model_info import ModelInfo

# Fraction of the free memory; the micro-batches of the responses need the rest.
MAX_FREE_SHARE = 0.5


def graph_fits(config: Any, num_tokens: int, model_info: ModelInfo) -> bool:
    free = free_bytes(model_info.device)
    return free is None or graph_bytes(config, num_tokens, model_info) <= MAX_FREE_SHARE * free


def graph_bytes(config: Any, num_tokens: int, model_info: ModelInfo) -> int:
    """Estimated size of the graph. A checkpointed layer stores its input, keys and values."""
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
    """Bytes available for allocation, or None if unknown.

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
    """Bytes below the cgroup's limit, counting reclaimable file pages; yields none without one."""
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
