"""GPU setup of shared-prefix attention after vLLM's warm-up: all ranks calibrate and agree.

All ranks of an engine replica must decide alike whether a step shares prefixes, since that selects
its CUDA graph. Tensor-parallel ranks run a graph's collectives together. A pipeline stage copies as
many hidden states as its own graph has tokens, and the stage before it has padded them for another.
So the ranks compare their layers first, and the first rank measures the crossover for all.

Data-parallel replicas decide for themselves, and each has a world group of its own. vLLM
synchronizes the graphs of replicas only for mixture-of-experts models, where one that shares would
take the others' steps out of their full graphs; `engine/launch/ranks/data_parallel.py` refuses
these.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group

from engine.attention import cuda_calibration
from engine.attention.crossover import Crossover
from engine.attention.cuda_calibration import LayerGeometry
from engine.attention.register import FEATURE, settings
from engine.attention.target_builders import target_builders
from engine.runtime.feature_guard import Failure, attempt
from engine.types.feature_stats import AttentionFallbackReason

logger = logging.getLogger(__name__)
Layers = frozenset[tuple[int, LayerGeometry | AttentionFallbackReason]]
"""KV cache groups, with the geometry of their layers or the reason why they share nothing."""


def prepare(runner: Any) -> None:
    """Enable shared prefixes for the target model's layers, the same on all ranks.

    Every rank takes part, also one on which the feature has failed.
    """
    layers = _layers(runner)
    if any(other != layers for other in _gathered(layers)):
        logger.warning("shared-prefix attention is off: ranks of the engine have different layers")
        _disable(runner, "parallelism")
    elif layers is None:
        _disable(runner, "failed")
    else:
        geometries = sorted((g for _, g in layers if isinstance(g, LayerGeometry)), key=repr)
        if settings().shared_prefix == "auto" and geometries:
            _set_crossovers(runner, geometries)
        _compile(geometries)


def _no_layers(runner: Any) -> Layers | None:
    return None


@FEATURE.guarded(_no_layers)
def _layers(runner: Any) -> Layers | None:
    return frozenset(
        (group, builder.grouper.unsupported or cuda_calibration.geometry_of(builder))
        for group, builder in target_builders(runner)
    )


def _gathered(layers: Layers | None) -> list[Layers | None]:
    world = get_world_group()
    if world.world_size == 1:
        return [layers]
    found: list[Layers | None] = [None] * world.world_size
    torch.distributed.all_gather_object(found, layers, group=world.cpu_group)
    return found


def _disable(runner: Any, reason: AttentionFallbackReason) -> None:
    for _, builder in target_builders(runner):
        if builder.grouper is not None:
            builder.grouper.unsupported = reason


def _set_crossovers(runner: Any, geometries: Iterable[LayerGeometry]) -> None:
    world = get_world_group()
    measured = attempt(_measure, geometries) if world.rank_in_group == 0 else None
    agreed: dict[LayerGeometry, Crossover] | Failure = world.broadcast_object(measured, src=0)
    if isinstance(agreed, Failure):
        FEATURE.disable(RuntimeError(f"the attention crossover: {agreed.message}"))
        _disable(runner, "failed")
        return
    for _, builder in target_builders(runner):
        if builder.grouper.unsupported is None:
            builder.grouper.crossover = agreed[cuda_calibration.geometry_of(builder)]


def _measure(geometries: Iterable[LayerGeometry]) -> dict[LayerGeometry, Crossover]:
    return {geometry: cuda_calibration.crossover_of(geometry) for geometry in geometries}


@FEATURE.guarded_with_default(None)
def _compile(geometries: Iterable[LayerGeometry]) -> None:
    for geometry in geometries:
        cuda_calibration.compile_kernels(geometry)
