"""Tokens of the trees of sessions, as `coppice.train` forwards them."""

from functools import cache

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from coppice import Group
from coppice.train import TrainingTree, grouped_backward


@cache
def _model() -> Qwen3ForCausalLM:
    """The smallest model; the number of tokens does not depend on its size."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config)


def num_forwarded_tokens(group: Group) -> int:
    """Number of tokens whose embeddings are looked up in a gradient step on a tree."""
    model, seen = _model(), list[int]()
    embedding: torch.nn.Module = model.get_input_embeddings()

    def count(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        seen.append(arguments[0].numel())

    hook = embedding.register_forward_pre_hook(count)
    tree = TrainingTree.of(group.prompt_token_ids, group)
    grouped_backward(model, tree, lambda rows: -rows.logprobs.sum())
    hook.remove()
    return sum(seen)


def num_sampled_of_longest(group: Group) -> int:
    """Number of sampled tokens on the longest path of a tree."""
    assert group.tree is not None, "sessions have trees"
    paths = [group.tree.path(leaf) for leaf in group.tree.leaves]
    longest = max(paths, key=lambda path: sum(len(segment.token_ids) for segment in path))
    return sum(len(segment.token_ids) for segment in longest if segment.sampled)
