"""Iterator over a model runner's attention metadata builders, without those of a draft model."""

from collections.abc import Iterator
from typing import Any


def target_builders(runner: Any) -> Iterator[tuple[int, Any]]:
    """The builders that can share prefixes, with the number of their KV cache group.

    There are none before the KV cache is configured, between memory profiling, whose builders vLLM
    drops, and the configuration, and after the shutdown. vLLM's groups include those of draft
    layers. These are left out, as sharing in a draft model would take the target model's step out
    of its full CUDA graph. A group may hold layers of both; it is the target's.
    """
    speculator = getattr(runner, "speculator", None)
    draft_layers: set[str] = getattr(speculator, "draft_attn_layer_names", set())
    for number, groups in enumerate(getattr(runner, "attn_groups", ())):
        for group in groups:
            builder = group.get_metadata_builder()
            if hasattr(builder, "grouper") and not draft_layers.issuperset(group.layer_names):
                yield number, builder
