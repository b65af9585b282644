"""Whether the graph of a prompt's forward can be kept while its responses are computed."""

from pathlib import Path
from typing import Any

import torch

from coppice.train.traits import Traits

# Of what is free: the responses' passes need the rest.
SHARE = 0.5


def graph_fits(config: Any, num_tokens: int, traits: Traits) -> bool:
    free = free_bytes(traits.device)
    return free is None or graph_bytes(config, num_tokens, traits) <= SHARE * free


def graph_bytes(config: Any, num_tokens: int, traits: Traits) -> int:
    """An estimate; a checkpointed layer keeps its input, keys and values."""
    size = traits.dtype.itemsize
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads * head_dim
    keys = config.num_key_value_heads * head_dim
    if traits.checkpointed:
        numbers = config.hidden_size + 2 * keys
        return int(num_tokens * traits.num_layers * numbers * size)
    # Norms and rotary embedding keep their input in float32 and what they make of it.
    wide = 2 * config.hidden_size + queries + keys
    numbers = 5 * config.hidden_size + 4 * queries + 4 * keys + 5 * config.intermediate_size
    return int(num_tokens * traits.num_layers * (numbers * size + wide * 4))


def free_bytes(device: torch.device) -> int | None:
    """What an allocation can have without another one's end; None where nobody says."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
