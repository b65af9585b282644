"""Frozen weights with trained adapters: hand-written ones, and PEFT's."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from coppice.train import grouped_backward
from tests.train.models import error, gradients, random_group, random_loss, tiny_model
from tests.train.naive import naive_backward
from tests.train.test_backward import SCHEDULES
from tests.train.test_checkpointing import checkpointed, schedules

pytestmark = pytest.mark.slow


class Adapted(nn.Module):
    """A frozen linear layer and a trained one of rank 4."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(4, frozen.in_features) / 8)
        self.up = nn.Parameter(torch.randn(frozen.out_features, 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.frozen(x) + x @ self.down.T @ self.up.T
        return adapted


def adapted_model(*names: str) -> Any:
    """A model with adapters on the named projections of every layer as its only trained weights."""
    model = tiny_model().requires_grad_(False)
    for layer in model.model.layers:
        for name in names:
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


@pytest.mark.parametrize(
    "names", [("q_proj", "v_proj"), ("k_proj",), ("o_proj",), ("q_proj", "k_proj", "o_proj")]
)
def test_adapters_get_the_padded_gradient(names: tuple[str, ...]) -> None:
    model, group = adapted_model(*names), random_group()
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    assert exact.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for schedule in SCHEDULES:
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=100)
        assert error(gradients(model), exact) < 1e-5, schedule


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpointed_adapters_get_the_padded_gradient(reentrant: bool) -> None:
    model, group = adapted_model("q_proj", "v_proj"), random_group()
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    checkpointed(model, reentrant=reentrant)
    for schedule in schedules(reentrant):
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=100)
        assert error(gradients(model), exact) < 1e-5, schedule


@pytest.mark.parametrize("checkpoint", [None, False, True], ids=["none", "plain", "reentrant"])
def test_peft_adapters_get_the_padded_gradient(checkpoint: bool | None) -> None:
    torch.manual_seed(0)
    settings = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"]}
    model = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(**settings, task_type="CAUSAL_LM", init_lora_weights=False)
    ).train()
    group = random_group()
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    assert exact and all("lora" in name for name in exact)
    if checkpoint is not None:
        checkpointed(model, reentrant=checkpoint)
    for schedule in schedules(bool(checkpoint)):
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=100)
        assert error(gradients(model), exact) < 1e-5, schedule
