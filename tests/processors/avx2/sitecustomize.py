"""Makes this processor appear to have AVX2 and no AVX-512 to software that queries CPU features.

Python imports this file at start-up if its folder is on PYTHONPATH, also in processes that the
engine starts. oneDNN, MKL, ATen and the kernels of this repository read variables; vLLM, which
selects its compiled extension by torch's capabilities, gets modified ones. This shows which code
runs and how it rounds, not the speed of an older processor.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
os.environ["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
os.environ["COPPICE_SHARED_PREFIX_ISA"] = "avx2"

import torch

NEWER = ("avx512", "avx10", "amx", "avx_vnni", "avx_ne")
_reported = torch.cpu.get_capabilities()


def get_capabilities() -> Mapping[str, object]:
    return MappingProxyType(
        {name: False if name.startswith(NEWER) else value for name, value in _reported.items()}
    )


torch.cpu.get_capabilities = get_capabilities  # type: ignore[assignment]
