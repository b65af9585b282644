"""Gradient checkpointing recomputes layers in the backward, where they must see the prompt."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from coppice.train import (
    RowLogprobs,
    Schedule,
    TrainingGroup,
    attending,
    compute_prompt_kv,
    grouped_backward,
    packed_logprobs,
)
from coppice.train.attention.forward_contexts import AttentionContext
from tests.train.models import LENGTHS, error, gradients, random_group, random_loss, tiny_model
from tests.train.test_backward import SCHEDULES, naive_gradients

pytestmark = pytest.mark.slow

EITHER = pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])


def checkpointed(model: Any, *, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def schedules(reentrant: bool) -> list[Schedule]:
    return ["injected", "packed"] if reentrant else SCHEDULES


@EITHER
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_every_schedule_gives_the_padded_gradient(family: str, reentrant: bool) -> None:
    model, group = tiny_model(family), random_group()
    exact = naive_gradients(model, group)
    checkpointed(model, reentrant=reentrant)
    for schedule in schedules(reentrant):
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=100)
        assert error(gradients(model), exact) < 1e-5, schedule


@EITHER
def test_gradient_with_given_prompt_kv_is_exact(reentrant: bool) -> None:
    model, group = tiny_model(), random_group()
    exact = naive_gradients(model, group)
    checkpointed(model, reentrant=reentrant)
    prompt_kv = compute_prompt_kv(model, group)
    report = grouped_backward(model, group, random_loss(group), prompt_kv=prompt_kv)
    assert report.schedule == ("injected" if reentrant else "recomputed")
    assert error(gradients(model), exact) < 1e-5


@pytest.mark.parametrize(
    ("reentrant", "schedule"),
    [(reentrant, schedule) for reentrant in (False, True) for schedule in schedules(reentrant)],
)
def test_checkpointed_layers_attend_to_the_prompt(reentrant: bool, schedule: Schedule) -> None:
    """In the loss and in the backward: another prompt changes both."""
    model = checkpointed(tiny_model(), reentrant=reentrant)
    group = random_group()
    other = TrainingGroup(prompt=group.prompt.flip(0), responses=group.responses)
    losses, grads = [], []
    for each in (group, other):
        report = grouped_backward(model, each, mean_surprise, schedule=schedule)
        losses.append(report.loss)
        grads.append(gradients(model))
    assert abs(losses[1] - losses[0]) > 0.01
    assert error(grads[1], grads[0]) > 0.1


def mean_surprise(rows: RowLogprobs) -> Tensor:
    return -rows.logprobs.sum() / sum(LENGTHS)


@EITHER
def test_past_key_values_would_be_dropped_silently(reentrant: bool) -> None:
    """The reason why the prompt is passed through the attention interface.

    Checkpointed layers drop the cache. A mask of its length may then fail, but attention without a
    mask, such as this one, returns results as if there were no prompt.
    """
    model = checkpointed(tiny_model(), reentrant=reentrant)
    group = random_group((9,))
    with torch.no_grad():
        cache = model.eval()(input_ids=group.prompt.unsqueeze(0), use_cache=True).past_key_values
    model.train().config._attn_implementation = "without mask"
    response = group.responses[0].unsqueeze(0)
    positions = torch.arange(response.shape[1]).unsqueeze(0) + len(group.prompt)
    given: dict[str, Any] = {"input_ids": response, "position_ids": positions, "use_cache": False}
    with_cache = model(**given, past_key_values=cache).logits
    assert torch.equal(with_cache, model(**given).logits)


def attention_without_mask(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("without mask", attention_without_mask)


@pytest.mark.parametrize("schedule", ["kept", "recomputed"])
def test_reentrant_checkpoints_refuse_a_backward_started_inside(schedule: Schedule) -> None:
    model, group = checkpointed(tiny_model(), reentrant=True), random_group()
    with pytest.raises(ValueError, match="use injected or packed"):
        grouped_backward(model, group, random_loss(group), schedule=schedule)
    assert gradients(model) == {}


@EITHER
def test_automatic_schedule_is_exact(reentrant: bool) -> None:
    model, group = tiny_model(), random_group()
    exact = naive_gradients(model, group)
    checkpointed(model, reentrant=reentrant)
    report = grouped_backward(model, group, random_loss(group), pass_tokens=100)
    assert report.schedule == ("injected" if reentrant else "kept")
    assert error(gradients(model), exact) < 1e-5


@EITHER
def test_packed_backward_must_run_inside_attending(reentrant: bool) -> None:
    model, group = tiny_model(), random_group()
    exact = naive_gradients(model, group)
    checkpointed(model, reentrant=reentrant)
    with pytest.raises(ValueError, match="inside attending"):
        packed_logprobs(model, [group])
    with attending(model):
        [rows] = packed_logprobs(model, [group])
        random_loss(group)(rows).backward()  # type: ignore[no-untyped-call]
    assert error(gradients(model), exact) < 1e-5


@pytest.mark.parametrize(
    ("reentrant", "schedule"),
    [(reentrant, schedule) for reentrant in (False, True) for schedule in schedules(reentrant)],
)
def test_failing_loss_leaks_nothing(reentrant: bool, schedule: Schedule) -> None:
    """The garbage collector cannot free a reference cycle through an autograd graph."""

    def fail(rows: RowLogprobs) -> Tensor:
        raise ZeroDivisionError

    model = checkpointed(tiny_model(), reentrant=reentrant)
    with pytest.raises(ZeroDivisionError):
        grouped_backward(model, random_group(), fail, schedule=schedule)
    grouped_backward(model, random_group(), mean_surprise, schedule=schedule)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if AttentionContext in type(thing).__mro__]
