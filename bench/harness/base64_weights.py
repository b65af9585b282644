"""Extension of vLLM's worker that loads weights from base64, for a comparison."""

import time
from typing import Any, Final

import pybase64
import torch
from safetensors.torch import load

EXTENSION: Final = f"{__name__}.Base64Loader"


class Base64Loader:
    """Methods that vLLM adds to its worker with `--worker-extension-cls`."""

    reload_weights: Any
    received_state: dict[str, torch.Tensor]

    def receive_base64(self, tensors: str) -> None:
        """Decode a safetensors file in base64, before the pause."""
        self.received_state = load(pybase64.b64decode(tensors))

    def load_received(self) -> float:
        """Load the received tensors into the model; returns the seconds."""
        began = time.perf_counter()
        self.reload_weights(weights_iterator=iter(self.received_state.items()))
        self.received_state = {}
        return time.perf_counter() - began
