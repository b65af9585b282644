"""Older processors, as which this one appears to software that queries CPU features.

Python imports this file at start-up if its folder is on PYTHONPATH, also in processes that the
engine starts. EMULATED_PROCESSOR names the processor. oneDNN, MKL, ATen and the kernels of this
repository read variables; vLLM, which selects its compiled extension and its kernels by torch's
capabilities, gets modified ones. This shows which code runs and how it rounds, not the speed of an
older processor, nor that compiled code has no newer instructions.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Limits of a processor for each library; `hidden` are prefixes of torch's capabilities."""

    needs: str
    hidden: tuple[str, ...]
    onednn: str
    mkl: str
    aten: str
    kernel: str


AFTER_BFLOAT16: Final = ("amx", "avx10", "avx512_fp16")
AFTER_VNNI: Final = (*AFTER_BFLOAT16, "avx512_bf16", "avx_ne")
AFTER_AVX512: Final = (
    *(*AFTER_VNNI, "avx512_vnni", "avx_vnni", "avx512_vbmi", "avx512_ifma"),
    *("avx512_bitalg", "avx512_vpopcntdq", "avx512_vp2intersect"),
)
AFTER_AVX2: Final = (*AFTER_AVX512, "avx512")
PROCESSORS: Final = {
    "avx2": Processor(
        needs="avx2", hidden=AFTER_AVX2, onednn="AVX2", mkl="AVX2", aten="avx2", kernel="avx2"
    ),
    "avx512": Processor(
        needs="avx512_f",
        hidden=AFTER_AVX512,
        onednn="AVX512_CORE",
        mkl="AVX512",
        aten="avx512",
        kernel="avx2",
    ),
    "avx512_vnni": Processor(
        needs="avx512_vnni",
        hidden=AFTER_VNNI,
        onednn="AVX512_CORE_VNNI",
        mkl="AVX512_E1",
        aten="avx512",
        kernel="avx2",
    ),
    "avx512_bf16": Processor(
        needs="avx512_bf16",
        hidden=AFTER_BFLOAT16,
        onednn="AVX512_CORE_BF16",
        mkl="AVX512_E3",
        aten="avx512",
        kernel="avx512_bf16",
    ),
}


def emulate(processor: Processor) -> None:
    """Set the limits. torch is imported afterwards, because its libraries read them once."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = processor.onednn
    os.environ["MKL_ENABLE_INSTRUCTIONS"] = processor.mkl
    os.environ["ATEN_CPU_CAPABILITY"] = processor.aten
    os.environ["COPPICE_SHARED_PREFIX_ISA"] = processor.kernel
    import torch

    capabilities = MappingProxyType(
        {
            name: False if name.startswith(processor.hidden) else value
            for name, value in torch.cpu.get_capabilities().items()
        }
    )

    def get_capabilities() -> Mapping[str, object]:
        return capabilities

    torch.cpu.get_capabilities = get_capabilities  # type: ignore[assignment]


if name := os.environ.get("EMULATED_PROCESSOR"):
    emulate(PROCESSORS[name])
