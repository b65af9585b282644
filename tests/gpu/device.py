"""Device of the GPU tests, and the settings of an engine on it.

With COPPICE_REHEARSE set, tests that need no CUDA kernel of ours run on a CPU, with vLLM's CPU
backend, so that their code is tried before a GPU is at hand.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.engine.stepped_engine import LiveEngine

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CAN_RUN = ON_GPU or "COPPICE_REHEARSE" in os.environ
LOGPROB_TOLERANCE = 0.15
"""Of bfloat16 against float32."""
TIE = 0.15
"""A token may be this far behind the greedy choice of the float32 model, in logits."""
ENGINE: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 16, "max_num_batched_tokens": 256}
if ON_GPU:
    ENGINE |= {"gpu_memory_utilization": 0.2, "enforce_eager": False}


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[LiveEngine]:
    """An engine with vLLM's CUDA graphs, whose memory is free again afterwards."""
    live = LiveEngine(model, **(ENGINE | settings))
    try:
        yield live
    finally:
        live.close()
        del live
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
