"""GPU memory of CUDA graphs, estimated from a model's config.json."""

import json
from pathlib import Path
from typing import Any

from engine.cudagraphs.plan_score import MIN_GRAPH_BYTES, GraphMemory, estimate_memory

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def memory(directory: Path, config: dict[str, Any], **options: Any) -> GraphMemory:
    (directory / "config.json").write_text(json.dumps(config))
    return estimate_memory(directory, **options)


def test_graphs_grow_with_layers_and_the_pool_with_the_widest_half_layer(tmp_path: Path) -> None:
    whole = memory(tmp_path, LLAMA_8B)
    assert whole.graph_bytes == 6 * 2**20
    assert whole.token_bytes == 2 * (3 * 4096 + 3 * 14336)
    assert memory(tmp_path, {**LLAMA_8B, "num_hidden_layers": 2}).graph_bytes == MIN_GRAPH_BYTES


def test_ranks_divide_the_mlp_width_but_not_the_hidden_state(tmp_path: Path) -> None:
    assert memory(tmp_path, LLAMA_8B, ranks=8).token_bytes == 2 * (3 * 4096 + 3 * 14336 // 8)


def test_dtype_overrides_that_of_the_model(tmp_path: Path) -> None:
    assert memory(tmp_path, LLAMA_8B, dtype="float32").token_bytes == 4 * (3 * 4096 + 3 * 14336)


def test_mixture_of_experts_is_sized_by_its_active_experts(
    tmp_path: Path,
) -> None:
    experts = {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
    found = memory(tmp_path, {"text_config": {**LLAMA_8B, **experts}})
    assert found.token_bytes == 2 * (3 * 4096 + 3 * 8 * 768)
