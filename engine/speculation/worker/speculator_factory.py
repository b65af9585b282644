"""Patch of vLLM's `init_speculator` (Model Runner V2): returns Coppice's speculators.

The model runner calls vLLM's factory `init_speculator`, which has no extension point for classes of
others.
"""

import functools
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, Final

from engine.speculation.settings import SIBLING_MODES, SpeculationMode, process_settings

MODEL_RUNNER = "vllm.v1.worker.gpu.model_runner"
SPECULATORS: Final[dict[SpeculationMode, str]] = dict.fromkeys(
    SIBLING_MODES, "engine.speculation.worker.gpu_speculator:SiblingSpeculator"
)
"""Class of each mode that drafts. A feature that drafts adds its own when it is installed."""


def install() -> None:
    """Replace vLLM's factory, also in a model runner that has already imported it."""
    from vllm.v1.worker.gpu import spec_decode

    stock = spec_decode.init_speculator
    if not hasattr(stock, "__wrapped__"):
        spec_decode.init_speculator = replacing(stock)
    if MODEL_RUNNER in sys.modules:
        runner: Any = sys.modules[MODEL_RUNNER]
        runner.init_speculator = spec_decode.init_speculator


def replacing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's factory, except in the modes of `speculation.mode` that draft."""

    @functools.wraps(stock)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        speculator = SPECULATORS.get(process_settings().mode)
        create = stock if speculator is None else pkgutil.resolve_name(speculator)
        return create(vllm_config, device, req_states)

    return init_speculator
