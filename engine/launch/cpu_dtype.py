"""The data type that `engine.dtype` stands for on a CPU."""

import logging
from collections.abc import Mapping
from typing import Final

from engine.settings import DType

log = logging.getLogger(__name__)

BFLOAT16_CAPABILITIES: Final = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Names of torch.cpu.get_capabilities(), of x86 and of ARM."""


def cpu_dtype(dtype: DType, capabilities: Mapping[str, object]) -> DType:
    """float32 for auto where bfloat16 is emulated, which takes several times as long."""
    if dtype != "auto" or _may_have_bfloat16(capabilities):
        return dtype
    log.info(
        "engine.dtype auto is float32: this CPU has no bfloat16 instructions; "
        "weights in bfloat16 are converted when they are loaded"
    )
    return "float32"


def _may_have_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """True also for an architecture for which torch reports none of them."""
    reported = [capabilities[name] for name in BFLOAT16_CAPABILITIES if name in capabilities]
    return not reported or any(reported)
