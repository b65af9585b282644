"""Check that keys can be moved: the config, and the RoPE tables that vLLM really uses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.rope_shift import UnsupportedRotary, parse_rotary

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

HEAD_DIM = 32
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def embedding(*, theta: float = 10000.0, scale: float = 1.0, **changes: Any) -> Any:
    rotary = parse_rotary({"rope_theta": theta}, HEAD_DIM)
    table = torch.stack([torch.cat(rotary.cos_sin(place)) for place in range(64)]) * scale
    usual = {"is_neox_style": True, "rotary_dim": HEAD_DIM, "cos_sin_cache": table}
    return SimpleNamespace(**(usual | changes))


def rotary_of_model(*embeddings: Any, **config: Any) -> Any:
    from engine.kv_transfer.worker import export_setup

    layout: Any = SimpleNamespace(layers=LAYERS[: len(embeddings)], head_dim=HEAD_DIM)
    modules = {
        layer.rpartition(".")[0]: SimpleNamespace(rotary_emb=found)
        for layer, found in zip(layout.layers, embeddings, strict=True)
        if found is not None
    }

    def get_submodule(name: str) -> Any:
        if name not in modules:
            raise AttributeError(name)
        return modules[name]

    model = SimpleNamespace(get_submodule=get_submodule)
    return export_setup.rotary_of_model(
        model, SimpleNamespace(**({"rope_parameters": ROPE} | config)), layout
    )


def test_one_rope_of_all_layers_is_accepted_scaled_or_in_short_floats() -> None:
    plain = embedding()
    assert rotary_of_model(plain, plain).num_channels == HEAD_DIM
    assert rotary_of_model(embedding(scale=1.14)).num_channels == HEAD_DIM
    rounded = embedding(cos_sin_cache=embedding().cos_sin_cache.bfloat16())
    assert rotary_of_model(rounded).num_channels == HEAD_DIM


@pytest.mark.parametrize(
    ("embeddings", "config", "why"),
    [
        ([embedding(), embedding()], {}, "different rotary"),
        ([None], {}, "no rotary embedding"),
        ([embedding(is_neox_style=False)], {}, "adjacent"),
        ([embedding(rotary_dim=16)], {}, "16 channels"),
        ([embedding(theta=500.0)], {}, "configured angles"),
        ([embedding()], {"no_rope_layers": [1, 0]}, "some layers"),
        ([embedding()], {"rope_parameters": None}, "rope_theta is missing"),
    ],
)
def test_any_other_rope_is_refused(embeddings: list[Any], config: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedRotary, match=why):
        rotary_of_model(*embeddings, **config)
