"""Models whose prompts are exported, and their KV by Hugging Face's forward."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from engine.kv_transfer.feature import PROMPT_KV_CONNECTOR
from engine.types.kv import ExportSlot, ExportStatus, KvFormat
from tests.arena import TestArena
from tests.engine.random_models import HEAD_DIM, HEADS, HIDDEN, INNER, LAYERS, VOCAB
from tests.engine.stepped_engine import LiveEngine

COMMITTED, PENDING = [ExportStatus.COMMITTED], [ExportStatus.PENDING]
Family = Literal["qwen3", "llama", "mistral"]
EXPORTING: dict[str, Any] = {
    "kv_transfer_config": dict(PROMPT_KV_CONNECTOR),
    "max_num_batched_tokens": 64,
}


def save_model(
    directory: Path, family: Family, *, num_kv_heads: int, seed: int = 5, **more: Any
) -> Path:
    """Random weights, so large that keys and values are of order one."""
    import transformers

    name = family.capitalize()
    sizes = {"num_hidden_layers": LAYERS} | more
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        initializer_range=0.1,
        **sizes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(directory)
    return directory


def kv_format(num_kv_heads: int, **changes: Any) -> KvFormat:
    usual: dict[str, Any] = {"num_layers": LAYERS, "head_dim": HEAD_DIM, "dtype": "float32"}
    return KvFormat(num_kv_heads=num_kv_heads, rope={}, **(usual | changes))


def exporting(model: Path, **settings: Any) -> LiveEngine:
    """An engine that has learned the layout of its cache, as the service does at every start."""
    engine = LiveEngine(model, **(EXPORTING | settings))
    for answer in engine.rpc("coppice_prepare_kv_export"):
        assert isinstance(answer, dict), answer
    return engine


def reference(model: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


def reference_kv(model: Any, prompt: Sequence[int], num_tokens: int) -> torch.Tensor:
    """[L, 2, H, T, D] of Hugging Face's own forward over the whole prompt."""
    with torch.inference_mode():
        cache = model(torch.tensor([list(prompt)]), use_cache=True).past_key_values
    both = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    return torch.stack(both)[:, :, :, :num_tokens].float()


def exported(arena: TestArena, slot: ExportSlot) -> torch.Tensor:
    form = arena.form
    shape = (form.num_layers, 2, form.num_kv_heads, slot.num_tokens, form.head_dim)
    return torch.from_numpy(arena.data(slot)).view(getattr(torch, form.dtype)).view(shape)


def max_error(arena: TestArena, slot: ExportSlot, truth: torch.Tensor) -> float:
    return float((exported(arena, slot).float() - truth).abs().max())


def assert_nothing_is_left(engine: LiveEngine) -> None:
    """No export or load is pending, and all blocks of the pool are free."""
    connector = engine.core.scheduler.connector
    assert (connector.export_planner.num_tracked, connector.load_planner.num_pending) == (0, 0)
    pool = engine.core.coppice_check_pool()
    assert pool["num_free_blocks"] == pool["num_blocks"]
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)
