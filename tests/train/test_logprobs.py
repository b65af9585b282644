"""Logprobs with each prompt prefilled once equal those of a padded batch."""

import pytest
import torch
from torch import Tensor

from coppice.train import (
    PromptKV,
    TrainingGroup,
    compute_prompt_kv,
    group_logprobs,
    packed_logprobs,
)
from tests.train.models import error, gradients, random_group, random_loss, tiny_model
from tests.train.naive import naive_logprobs
from tests.train.test_backward import naive_gradients

pytestmark = pytest.mark.slow

FAMILIES = pytest.mark.parametrize("family", ["qwen3", "llama"])
EDGES = pytest.mark.parametrize(
    "group",
    [random_group(), random_group((0, 3, 0)), random_group(prompt_tokens=1), random_group((1,))],
    ids=["uneven", "empty rows", "prompt of one", "one token"],
)


def close(found: Tensor, exact: Tensor) -> bool:
    return torch.allclose(found, exact, rtol=0, atol=2e-5)


@FAMILIES
@EDGES
def test_group_logprobs_equal_the_padded_ones(family: str, group: TrainingGroup) -> None:
    model = tiny_model(family)
    exact = naive_logprobs(model, group).logprobs
    for pass_tokens in (1, 50, 1000):
        found = group_logprobs(model, group, pass_tokens=pass_tokens)
        assert close(found.logprobs, exact)
        assert not found.logprobs.requires_grad
        assert found.lengths == group.lengths


@FAMILIES
@EDGES
def test_group_logprobs_from_prompt_kv_equal_the_padded_ones(
    family: str, group: TrainingGroup
) -> None:
    model = tiny_model(family)
    if len(group.prompt) == 1:
        prompt_kv = PromptKV(keys=(torch.zeros(2, 0, 16),) * 3, values=(torch.zeros(2, 0, 16),) * 3)
    else:
        prompt_kv = compute_prompt_kv(model, group)
    found = group_logprobs(model, group, prompt_kv)
    assert close(found.logprobs, naive_logprobs(model, group).logprobs)


def test_prompt_kv_is_used_instead_of_a_prefill() -> None:
    model, group = tiny_model(), random_group()
    other = compute_prompt_kv(tiny_model(seed=1), group)
    assert not close(
        group_logprobs(model, group, other).logprobs, group_logprobs(model, group).logprobs
    )


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_logprobs_are_those_at_the_temperature(temperature: float) -> None:
    model, group = tiny_model(), random_group()
    exact = naive_logprobs(model, group, temperature=temperature).logprobs
    assert close(group_logprobs(model, group, temperature=temperature).logprobs, exact)
    [packed] = packed_logprobs(model, [group], temperature=temperature)
    assert close(packed.logprobs, exact)


def test_group_without_tokens_has_no_logprobs() -> None:
    found = group_logprobs(tiny_model(), random_group((0, 0)))
    assert [len(row) for row in found.split()] == [0, 0]


@FAMILIES
def test_packed_logprobs_of_several_groups_equal_the_padded_ones(family: str) -> None:
    model = tiny_model(family)
    groups = [
        random_group(),
        random_group((4, 4, 0, 9), prompt_tokens=1, seed=2),
        random_group((30,), prompt_tokens=7, seed=3),
    ]
    for found, group in zip(packed_logprobs(model, groups), groups, strict=True):
        assert close(found.logprobs, naive_logprobs(model, group).logprobs)
        assert found.lengths == group.lengths


@FAMILIES
def test_packed_logprobs_have_the_padded_gradient(family: str) -> None:
    model, group = tiny_model(family), random_group()
    exact = naive_gradients(model, group)
    [rows] = packed_logprobs(model, [group])
    random_loss(group)(rows).backward()  # type: ignore[no-untyped-call]
    assert error(gradients(model), exact) < 1e-5


def test_attention_of_the_model_is_restored_afterwards() -> None:
    model, group = tiny_model(), random_group()
    before = model.config._attn_implementation
    group_logprobs(model, group)
    packed_logprobs(model, [group])
    assert model.config._attn_implementation == before


def test_prompt_kv_has_the_canonical_layout() -> None:
    group = random_group()
    prompt_kv = compute_prompt_kv(tiny_model(), group)
    assert len(prompt_kv.keys) == len(prompt_kv.values) == 3
    for tensor in (*prompt_kv.keys, *prompt_kv.values):
        assert tensor.shape == (2, 60, 16)
        assert tensor.is_contiguous()


def test_prompt_kv_equals_the_cache_of_transformers() -> None:
    model, group = tiny_model(), random_group()
    with torch.no_grad():
        cache = model(input_ids=group.prompt[None, :-1], use_cache=True).past_key_values
    found = compute_prompt_kv(model, group)
    for layer in range(3):
        assert close(found.keys[layer], cache.layers[layer].keys[0])
        assert close(found.values[layer], cache.layers[layer].values[0])


def test_prompt_kv_is_made_from_the_tensors_of_a_handle() -> None:
    prompt_kv = compute_prompt_kv(tiny_model(), random_group())
    named = {f"k.{layer}": key for layer, key in enumerate(prompt_kv.keys)}
    named |= {f"v.{layer}": value for layer, value in enumerate(prompt_kv.values)}
    read = PromptKV.of_named(named)
    assert (read.keys, read.values) == (prompt_kv.keys, prompt_kv.values)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"num_hidden_layers": 2}, "has 2 layers, and the model 3"),
        ({"dtype": torch.bfloat16}, "approximation"),
    ],
)
def test_prompt_kv_of_another_shape_is_refused(other: dict[str, object], why: str) -> None:
    group = random_group()
    prompt_kv = compute_prompt_kv(tiny_model(**other), group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=why):
        group_logprobs(tiny_model(), group, prompt_kv)


def test_prompt_kv_of_another_prompt_length_is_refused() -> None:
    prompt_kv = compute_prompt_kv(tiny_model(), random_group(prompt_tokens=60))
    with pytest.raises(ValueError, match="has 59 tokens, and needs 60"):
        group_logprobs(tiny_model(), random_group(), prompt_kv)
