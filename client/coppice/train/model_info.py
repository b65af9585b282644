"""Properties of a model that determine which schedules are possible."""

from dataclasses import dataclass
from typing import Any

import torch

from coppice.train.distributed import is_sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of a model. `reentrant`: it uses reentrant activation checkpointing."""

    num_layers: int
    device: torch.device
    dtype: torch.dtype
    checkpointed: bool
    reentrant: bool
    sharded: bool

    @property
    def can_stop_early(self) -> bool:
        """True if an exception may end a forward early.

        A checkpointed layer must end in the same way when it is recomputed, and the hooks of a
        sharded layer must run at its end.
        """
        return not self.checkpointed and not self.sharded

    @property
    def requires_output_backward(self) -> bool:
        """True if backwards must start at the model's outputs instead of at keys and values."""
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
    """transformers stores a functools.partial of torch's checkpoint function."""
    return bool(getattr(function, "keywords", {}).get("use_reentrant", True))
