"""vLLM's EngineCore and output processor in one process, for `micro`, without any hook."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams

from bench.harness.host_path.limits import vllm_arguments
from bench.harness.host_path.micro_cases import MicroCase


@contextmanager
def vllm_config(model: Path) -> Iterator[Any]:
    os.environ["VLLM_PLUGINS"] = ""
    yield AsyncEngineArgs(**vllm_arguments(model)).create_engine_config()


def vllm_params(case: MicroCase, name: str, prompt: list[int]) -> Any:
    """Parameters as a user of AsyncLLM sets them who wants token ids and no text."""
    kind = RequestOutputKind.DELTA if case.is_streamed else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        max_tokens=case.max_tokens,
        ignore_eos=True,
        logprobs=case.logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=kind,
        skip_clone=True,
    )
