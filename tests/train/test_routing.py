"""Replay of sampled expert routing in Qwen3-MoE."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from coppice.train import (
    TrainingGroup,
    UnsupportedModel,
    attending,
    group_logprobs,
    grouped_backward,
    replay_routing,
)
from tests.train.naive import naive_backward, naive_logprobs

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def make_model(**options: Any) -> Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True, **options)
    return Qwen3MoeForCausalLM(config).train()


def routing_of(model: Any, tokens: Tensor) -> Tensor:
    """Experts [tokens, layers, experts per token] that a model selects by itself."""
    seen: dict[int, Tensor] = {}
    layers = [(at, each.mlp) for at, each in enumerate(model.model.layers)]
    handles = [
        mlp.gate.register_forward_hook(lambda _, __, out, at=at: seen.update({at: out[2]}))
        for at, mlp in layers
        if hasattr(mlp, "gate")
    ]
    with torch.no_grad():
        model(tokens.unsqueeze(0))
    for handle in handles:
        handle.remove()
    empty = torch.zeros_like(next(iter(seen.values())))
    return torch.stack([seen.get(at, empty) for at, _ in layers], 1)


def make_group(model: Any, *, replayed: bool) -> TrainingGroup:
    torch.manual_seed(4)
    prompt = torch.randint(0, 64, (9,))
    responses = tuple(torch.randint(0, 64, (length,)) for length in (5, 0, 7))
    rows = tuple(routing_of(model, torch.cat([prompt, each])[:-1]) for each in responses)
    return TrainingGroup(
        prompt=prompt, responses=responses, routed_experts=rows if replayed else None
    )


def perturbed(model: Any) -> Any:
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    for layer in other.model.layers:
        if hasattr(layer.mlp, "gate"):
            weight = layer.mlp.gate.weight
            weight.data += 0.3 * weight.std() * torch.randn_like(weight)
    return other


def grouped(model: Any, group: TrainingGroup) -> Tensor:
    with attending(model):
        return group_logprobs(model, group).logprobs


@pytest.mark.parametrize("options", [{}, {"mlp_only_layers": [1]}], ids=["sparse", "mixed"])
def test_replay_of_a_models_own_routing_changes_nothing(options: dict[str, Any]) -> None:
    model = make_model(**options)
    plain = naive_logprobs(model, make_group(model, replayed=False)).logprobs
    for logprobs in (naive_logprobs, grouped):
        found = logprobs(model, make_group(model, replayed=True))
        found = getattr(found, "logprobs", found)
        torch.testing.assert_close(found, plain, **CLOSE)


def test_perturbed_router_computes_with_the_sampled_experts() -> None:
    model = make_model()
    group, other = make_group(model, replayed=True), perturbed(model)
    tokens = torch.cat([group.prompt, group.responses[0]])[:-1]
    assert group.routed_experts is not None
    sampled = group.routed_experts[0]
    assert not torch.equal(routing_of(other, tokens), sampled)
    with replay_routing(other, sampled):
        assert torch.equal(routing_of(other, tokens), sampled)
    assert not torch.equal(routing_of(other, tokens), sampled)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_shared_prefill_has_the_logprobs_and_gradients_of_the_padded_batch(
    is_checkpointed: bool,
) -> None:
    model = make_model()
    group, other = make_group(model, replayed=True), perturbed(model)
    expected = copy.deepcopy(other)
    torch.testing.assert_close(
        grouped(other, group), naive_logprobs(expected, group).logprobs, **CLOSE
    )
    if is_checkpointed:
        other.gradient_checkpointing_enable({"use_reentrant": False})
    grouped_backward(other, group, lambda rows: -rows.logprobs.sum())
    naive_backward(expected, group, lambda rows: -rows.logprobs.sum())
    for (name, found), wanted in zip(other.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name, **CLOSE)
    assert other.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


def test_replay_needs_a_known_router_and_matching_rows() -> None:
    dense = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    group = make_group(make_model(), replayed=True)
    with pytest.raises(UnsupportedModel, match="router"):
        grouped(dense, group)
    with pytest.raises(ValueError, match="no router"):
        naive_logprobs(dense, group)
    assert group.routed_experts is not None
    with pytest.raises(ValueError, match="one row per token"):
        TrainingGroup(
            prompt=group.prompt, responses=group.responses, routed_experts=group.routed_experts[:1]
        )
