"""Resolution of the `engine.dtype` setting on a CPU."""

import logging
from collections.abc import Mapping
from typing import Final

from engine.settings import DType

log = logging.getLogger(__name__)

BFLOAT16_CAPABILITIES: Final = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Keys of torch.cpu.get_capabilities(), on x86 and on ARM."""


def cpu_dtype(dtype: DType, capabilities: Mapping[str, object]) -> DType:
    """The dtype to run with.

    For auto, float32 where bfloat16 is emulated, which is several times slower.
    """
    if dtype != "auto" or _may_have_bfloat16(capabilities):
        return dtype
    log.info(
        "engine.dtype auto is float32: this CPU has no bfloat16 instructions; "
        "weights in bfloat16 are converted when they are loaded"
    )
    return "float32"


def _may_have_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """True also on architectures for which torch reports none of the capabilities."""
    reported = [capabilities[name] for name in BFLOAT16_CAPABILITIES if name in capabilities]
    return not reported or any(reported)
