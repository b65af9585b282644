"""Engines of the GPU tests, with vLLM's CUDA graphs, in bfloat16."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.engine.stepped_engine import LiveEngine
from tests.gpu.device import ON_GPU

LOGPROB_TOLERANCE = 0.15
"""Of bfloat16 against float32."""
TIE = 0.15
"""A token may be this far behind the greedy choice of the float32 model, in logits."""
# With bfloat16, vLLM packs the KV cache of processors with AMX, so that no prefix would be shared.
DTYPE = "bfloat16" if ON_GPU else "float32"
ENGINE: dict[str, Any] = {"dtype": DTYPE, "max_num_seqs": 16, "max_num_batched_tokens": 256}
if ON_GPU:
    ENGINE |= {"gpu_memory_utilization": 0.2, "enforce_eager": False}


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[LiveEngine]:
    """An engine whose memory is free again afterwards."""
    live = LiveEngine(model, **(ENGINE | settings))
    try:
        yield live
    finally:
        live.close()
        del live
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
