"""Collective that tells all ranks which ranks failed, so that they decide alike."""

from typing import Final

import torch
from vllm.distributed.parallel_state import get_world_group

ASLEEP: Final = "the engine sleeps"


def failed_ranks(failed: bool) -> list[int]:
    """Gather on every rank which ranks failed. All ranks must call it equally often."""
    world = get_world_group()
    if world.world_size == 1:
        return [world.rank] if failed else []
    flags = torch.zeros(world.world_size, dtype=torch.int32, device="cpu")
    flags[world.rank_in_group] = failed
    torch.distributed.all_reduce(flags, group=world.cpu_group)
    return [world.ranks[i] for i in range(world.world_size) if flags[i]]
