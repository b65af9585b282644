"""Reduction of gradients and scaling of losses for training with DDP and FSDP2.

Loss normalizers cover all ranks, so gradients are summed, not averaged. Backward passes do not
synchronize; reduce_gradients does, once, before the optimizer step.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

BUCKET_NUMBERS = 1 << 24


def unwrap_ddp(model: Any) -> Any:
    """Returns the model inside a DDP wrapper, whose forward would prepare a gradient reduction."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def reduce_gradients(model: Any) -> None:
    """Sums the gradients over all ranks. Call it on every rank, after the backwards of a step.

    FSDP2 reduces accumulated gradients at the end of a backward, so a backward of zeros is run.
    """
    if isinstance(model, DistributedDataParallel):
        _sum_gradients(model.parameters(), model.process_group)
    elif is_sharded(model):
        _empty_backward(model)


@contextmanager
def no_gradient_sync(model: Any) -> Iterator[None]:
    """Context manager that disables the gradient reduction of a sharded (FSDP2) model."""
    if not is_sharded(model):
        yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def loss_scale(model: Any) -> int:
    """Factor of the loss that turns FSDP2's average of gradients over the ranks into a sum."""
    return int(_mesh(model).size()) if is_sharded(model) else 1


def max_passes_over_ranks(model: Any, num_passes: int) -> int:
    """Largest number of micro-batches on any of the ranks that share a sharded model.

    All of these ranks must run equally many forwards.
    """
    if not is_sharded(model):
        return num_passes
    mesh = _mesh(model)
    most = torch.tensor(num_passes, device=mesh.device_type)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group())
    return int(most.item())


def _sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    for bucket in _buckets(parameters):
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [grad.numel() for grad in bucket])
        for grad, part in zip(bucket, parts, strict=True):
            grad.copy_(part.view_as(grad))


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups gradients by dtype into buckets of about BUCKET_NUMBERS elements for all-reduce.

    The buckets are the same on every rank.
    """
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket = open_buckets.setdefault(parameter.dtype, [])
        bucket.append(parameter.grad)
        if sum(grad.numel() for grad in bucket) >= BUCKET_NUMBERS:
            yield open_buckets.pop(parameter.dtype)
    yield from open_buckets.values()


def _empty_backward(model: Any) -> None:
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=_mesh(model).device_type)
    logits = model(input_ids=token_11, use_cache=False).logits
    logits.backward(torch.zeros_like(logits))


def _mesh(model: Any) -> DeviceMesh:
    """Device mesh of a sharded model.

    Some parameters are still unsharded after a forward and have no mesh, hence the reshard().
    """
    for module in model.modules():
        if is_sharded(module):
            module.reshard()
    mesh: DeviceMesh = next(model.parameters()).device_mesh
    if mesh.ndim > 1:
        raise ValueError("only models that are sharded over a one-dimensional mesh are supported")
    return mesh
