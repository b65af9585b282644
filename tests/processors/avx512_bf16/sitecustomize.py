"""Makes this processor appear to have AVX-512 with bfloat16 and no AMX.

See `tests/processors/avx2/sitecustomize.py`. With AMX, vLLM packs a KV cache in bfloat16 for AMX,
and shared-prefix attention is off. Without it, vLLM packs for AVX-512.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"

import torch

_reported = torch.cpu.get_capabilities()


def get_capabilities() -> Mapping[str, object]:
    return MappingProxyType(
        {name: False if name.startswith("amx") else value for name, value in _reported.items()}
    )


torch.cpu.get_capabilities = get_capabilities  # type: ignore[assignment]
