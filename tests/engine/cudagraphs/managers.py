"""vLLM's own CUDA graph managers on a machine without a GPU.

Configuration, candidates and dispatch are vLLM's. Replaced are the pool, the graph, and the capture
context.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SEEDLING = Path(__file__).parents[3] / "examples" / "seedling" / "model"
Schedule = Sequence[tuple[int, int, int]]


def config_of(
    schedule: Schedule, *, max_sequences: int, max_tokens: int, sizes: list[int] | None = None
) -> Any:
    """A config as on a GPU, with vLLM's own sizes by default; draft lengths by running samples."""
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    longest = max(drafts for _, _, drafts in schedule)
    speculation = {
        "method": "draft_model",
        "model": str(SEEDLING),
        "num_speculative_tokens": longest,
        "num_speculative_tokens_per_batch_size": list(schedule),
    }
    config = EngineArgs(
        model=str(SEEDLING),
        max_num_seqs=max_sequences,
        max_num_batched_tokens=max_tokens,
        max_model_len=256,
        enforce_eager=True,
        speculative_config=speculation if longest else None,
    ).create_engine_config()
    config.model_config.enforce_eager = False
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, None
    config._set_cudagraph_sizes()
    return config


@contextmanager
def no_gpu_needed() -> Iterator[None]:
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    before = dict(os.environ)  # creating a config modifies the environment
    with pytest.MonkeyPatch.context() as patch:
        one_rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        patch.setattr(type(current_platform), "_global_graph_pool", "the pool")
        patch.setattr(cudagraph_utils, "get_pp_group", lambda: one_rank)
        patch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
        patch.setattr(cudagraph_utils, "graph_capture", lambda **_: nullcontext())
        patch.setattr(cudagraph_utils, "capture_pool", lambda pool, _: nullcontext(pool))
        patch.setattr(cudagraph_utils, "current_stream", lambda: None)
        patch.setattr(torch.cuda, "CUDAGraph", object)
        patch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
        patch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
        patch.setattr(torch.accelerator, "synchronize", lambda: None)
        yield
    os.environ.clear()
    os.environ.update(before)


def manager_of(config: Any, cls: Any = None) -> Any:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    speculative = config.speculative_config
    return (cls or CudaGraphManager)(
        config,
        torch.device("cpu"),
        config.compilation_config.cudagraph_mode,
        1 + (speculative.num_speculative_tokens if speculative else 0),
    )


def capture(manager: Any) -> list[Any]:
    """Captures with vLLM's own loop, which prepares each graph; returns them in this order."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    asked: list[Any] = []

    def create_forward_fn(desc: Any, warmup: bool) -> Any:
        if warmup:
            asked.append(desc)
        return lambda mode: None

    CudaGraphManager.capture(manager, create_forward_fn)
    return asked
