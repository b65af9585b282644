"""Construction of vLLM's AsyncEngineArgs from the engine settings and the enabled features."""

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from engine.errors import StartFailed
from engine.features import Features
from engine.launch.vllm_argument_checks import check_vllm_args
from engine.settings import GIB, DType, EngineSettings

log = logging.getLogger(__name__)
BFLOAT16_CAPABILITIES: Final = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Keys of torch.cpu.get_capabilities(), on x86 and on ARM."""
DEFAULT_CPU_CACHE_BYTES = GIB
DEFAULT_CPU_BLOCK_SIZE = 32
DEFAULT_CPU_SEQUENCES = 256
DEFAULT_CPU_BATCHED_TOKENS = 2048
MAX_ENTROPY_TOP_K = 20
WORKER_EXTENSION = "engine.launch.worker_extension.WorkerExtension"
RANDOM_SEED_BITS = 31
USAGE_CONTEXT: Final = UsageContext.OPENAI_API_SERVER
"""Kind of use for which vLLM chooses its batch limits. No usage is reported."""


def cpu_dtype(dtype: DType, capabilities: Mapping[str, object]) -> DType:
    """The dtype in which the model runs on a CPU.

    `auto` means float32 where bfloat16 is emulated, which is several times slower.
    """
    if dtype != "auto" or _may_have_bfloat16(capabilities):
        return dtype
    log.info(
        "engine.dtype auto is float32: this CPU has no bfloat16 instructions; "
        "weights in bfloat16 are converted when they are loaded"
    )
    return "float32"


def _may_have_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """True if the CPU has bfloat16 instructions, or torch cannot tell for its architecture."""
    reported = [capabilities[name] for name in BFLOAT16_CAPABILITIES if name in capabilities]
    return not reported or any(reported)


def check_cpu_quantization(method: str | None, capabilities: Mapping[str, object]) -> None:
    """Raise StartFailed for a method with which vLLM starts, but ends at its first request.

    oneDNN multiplies fp8 values with these instructions only. For other methods without a kernel,
    vLLM refuses to start.
    """
    if method == "fp8_per_channel" and not capabilities.get("avx512_fp16", True):
        raise StartFailed(
            "engine.quantization is fp8_per_channel, but this CPU has no AVX512_FP16 instructions; "
            "unset it, or use a newer processor"
        )


def with_defaults(settings: EngineSettings, *, on_cpu: bool, needs_limits: bool) -> EngineSettings:
    """Settings with the defaults of the platform.

    On a GPU vLLM chooses the block size and the batch limits itself, also by model and backend.
    `needs_limits`: a feature needs the batch limits beforehand.
    """
    if on_cpu:
        sequences, tokens = DEFAULT_CPU_SEQUENCES, DEFAULT_CPU_BATCHED_TOKENS
    elif needs_limits:
        sequences, tokens = _vllm_batch_limits(settings)
    else:
        return settings
    sequences = settings.max_sequences or sequences
    return settings.model_copy(
        update={
            "block_size": settings.block_size or (DEFAULT_CPU_BLOCK_SIZE if on_cpu else None),
            "max_sequences": sequences,
            "max_batched_tokens": settings.max_batched_tokens or max(tokens, sequences),
        }
    )


def _vllm_batch_limits(settings: EngineSettings) -> tuple[int, int]:
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(settings.num_ranks)
    return sequences[USAGE_CONTEXT], tokens[USAGE_CONTEXT]


def engine_arguments(
    settings: EngineSettings,
    model: Path,
    features: Features,
    *,
    on_cpu: bool,
    worker_extension: str = WORKER_EXTENSION,
    capabilities: Mapping[str, object] | None = None,
) -> AsyncEngineArgs:
    """Arguments for AsyncLLM. `capabilities` default to torch.cpu.get_capabilities().

    Raises StartFailed if vLLM has no such argument, or another type of value, or no kernel.
    """
    if capabilities is None:
        capabilities = torch.cpu.get_capabilities()
    if on_cpu:
        check_cpu_quantization(settings.quantization, capabilities)
    settings = with_defaults(
        settings, on_cpu=on_cpu, needs_limits=features.needs_batch_limits(on_cpu=on_cpu)
    )
    own = _own_arguments(
        settings, model, on_cpu=on_cpu, capabilities=capabilities, worker_extension=worker_extension
    )
    arguments = AsyncEngineArgs(**{**own, **check_vllm_args(settings)})
    # For constraints that begin after the reasoning.
    arguments.structured_outputs_config.reasoning_parser = settings.reasoning_parser or ""
    features.set_arguments(arguments, on_cpu=on_cpu)
    return arguments


def _own_arguments(
    settings: EngineSettings,
    model: Path,
    *,
    on_cpu: bool,
    capabilities: Mapping[str, object],
    worker_extension: str,
) -> dict[str, Any]:
    """Arguments before those of `engine.vllm_args`, which take precedence."""
    return dict(
        model=str(model),
        served_model_name=settings.served_name,
        dtype=cpu_dtype(settings.dtype, capabilities) if on_cpu else settings.dtype,
        seed=_seed(settings),
        max_model_len=settings.max_context_tokens,
        block_size=settings.block_size,
        max_num_seqs=settings.max_sequences,
        max_num_batched_tokens=settings.max_batched_tokens,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        enforce_eager=on_cpu if settings.eager is None else settings.eager,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        # Logprobs of the sampling distribution, after temperature and truncation.
        logprobs_mode="processed_logprobs",
        # Scoring of given tokens includes the token at the position itself.
        max_logprobs=max(settings.max_logprobs, MAX_ENTROPY_TOP_K) + 1,
        enable_return_routed_experts=settings.return_routed_experts,
        # The model's sampling defaults would silently override the request's.
        generation_config="vllm",
        # With the default, "auto", a schema that xgrammar cannot apply is compiled by a backend
        # that depends on the first request of the engine's life.
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
        worker_extension_cls=worker_extension,
        disable_log_stats=False,
        use_tqdm_on_load=False,
        **_memory_arguments(settings, on_cpu=on_cpu),
        **_sleep_mode_arguments(settings, on_cpu=on_cpu),
    )


def _seed(settings: EngineSettings) -> int:
    """Random seed of the engine: the `seed` setting, or else a random number.

    vLLM's default is 0 at every start, so replicas and restarts would generate the same samples.
    """
    return secrets.randbits(RANDOM_SEED_BITS) if settings.seed is None else settings.seed


def _memory_arguments(settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    cache_bytes = settings.cache_bytes or (DEFAULT_CPU_CACHE_BYTES if on_cpu else None)
    memory: dict[str, Any] = {"kv_cache_memory_bytes": cache_bytes}
    if not on_cpu:
        memory["gpu_memory_utilization"] = settings.gpu_memory_utilization
    return memory


def _sleep_mode_arguments(settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's sleep mode, which it does not have on CPU."""
    if on_cpu or not settings.enable_sleep_mode:
        return {}
    return {"enable_sleep_mode": True}
