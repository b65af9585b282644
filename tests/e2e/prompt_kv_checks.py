"""Prompt KV checks of the end-to-end scene: contents, versions and release of handles."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from coppice import AsyncRollouts, Kv, KvSource, PromptKV
from coppice.rollout_results import Group
from tests.serving import Served

# Two float32 implementations; a wrong position or version differs by whole units.
CLOSE = 1e-4


async def assert_all_match_model(
    served: Served, groups: Sequence[Group], prompts: Sequence[list[int]], version: str, model: Any
) -> None:
    """Asserts that the KV read over both transports matches the model."""
    for group, prompt in zip(groups, prompts, strict=True):
        assert group.kv is not None, group.kv_reason
        assert group.kv.version == version
        for transport in ("http", "shm"):
            source = KvSource(served.url, transports=[transport])
            kv = await asyncio.to_thread(PromptKV.fetch, group.kv, source)
            assert kv is not None, source.counts
            assert_matches_model(kv, prompt, model)
    served.server.prompt_kv.check()


def assert_matches_model(kv: PromptKV, prompt: list[int], model: Any) -> None:
    with torch.inference_mode():
        cache = model(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
    for (keys, values), layer in zip(kv.torch_layers(), cache.layers, strict=True):
        assert (keys - layer.keys[0]).abs().max() < CLOSE
        assert (values - layer.values[0]).abs().max() < CLOSE


async def check_handles_survive_activation(
    served: Served,
    rollouts: AsyncRollouts,
    before: tuple[str, Any],
    after: tuple[str, Any],
) -> None:
    """Handles keep their version across an activation.

    `before` is active. One prompt is prefilled before the activation, one waits for it.
    """
    early, late = [9, *range(40, 90)], [8, *range(50, 120)]
    old = await rollouts.rollout([early], n=2, max_tokens=4, kv=Kv())
    await rollouts.pause("keep")
    waiting = asyncio.create_task(rollouts.rollout([late], n=2, max_tokens=4, kv=Kv()))
    while served.server.rollouts.num_samples_running < 2:
        await asyncio.sleep(0.005)
    await rollouts.activate_weights(after[0], mode="keep", allow_rollback=True)
    await rollouts.resume()
    new = await waiting
    again = await rollouts.rollout([early], n=2, max_tokens=4, kv=Kv())
    await assert_all_match_model(served, old.groups, [early], *before)
    await assert_all_match_model(served, new.groups, [late], *after)
    await assert_all_match_model(served, again.groups, [early], *after)


async def release_all(served: Served) -> None:
    """Asserts that every byte is freed."""
    prompt_kv = served.server.prompt_kv
    for handle in list(prompt_kv.handles._handles.values()):
        prompt_kv.release(handle.id, handle.owner)
    prompt_kv.check()
    status = prompt_kv.status()
    assert (status.free_bytes, status.num_handles) == (status.capacity_bytes, 0)
