"""Feature class of shared-prefix attention: settings, status and counters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from engine.attention import register
from engine.attention.counters import COUNTERS, aggregate_ranks
from engine.attention.settings import ENVIRONMENT, AttentionSettings, process_settings
from engine.feature_base import EngineFeature, Ping, WorkerPart, feature_status
from engine.runtime.feature_guard import Failure, attempt
from engine.types.feature_stats import AttentionState, FeatureStatus, SharedPrefixStats, total

UNSUPPORTED: Final[dict[AttentionState, tuple[str, str]]] = {
    "off": ("attention.shared_prefix is off", "attention.shared_prefix: auto"),
    "backend": (
        "backend: the model uses a vLLM attention backend that it does not replace",
        "engine.vllm_args.attention_backend",
    ),
    "not_built": ("the kernel is not compiled", "install with a C++ compiler"),
    "isa": (
        "the processor has no AVX2, or vLLM packs the KV cache for other instructions (AMX in "
        "bfloat16, ARM)",
        "engine.dtype: float32 on a processor with AMX",
    ),
    "dtype": ("the kernel does not support the data type", "engine.dtype"),
    "kv_cache_dtype": ("the KV cache is quantized", "engine.kv_cache_dtype: auto"),
    "head_size": ("the kernel does not support the head size", ""),
    "block_size": ("the kernel does not support the block size", "engine.block_size"),
    "not_causal": ("attention is not causal", ""),
    "sliding_window": ("all layers have sliding windows", ""),
    "soft_cap": ("the model caps attention logits", ""),
    "alibi": ("the model has ALiBi position biases", ""),
    "sinks": ("the model has attention sinks", ""),
    "model_runner": ("vLLM uses Model Runner V1, which does not support it", ""),
    "parallelism": (
        "it does not support decode context parallelism, micro-batches, or pipeline stages that "
        "differ",
        "",
    ),
    "batch_invariant": ("VLLM_BATCH_INVARIANT is set", "unset VLLM_BATCH_INVARIANT"),
    "failed": ("an error at the start, which is logged, has switched it off", ""),
}


def _install() -> None:
    register.install(process_settings())


def coppice_attention_state(self: Any) -> AttentionState:
    """State of shared-prefix attention in a worker, once the model is loaded. Never raises."""
    state = attempt(register.state, self.model_runner)
    return "failed" if isinstance(state, Failure) else state


class SharedPrefixAttention(EngineFeature):
    """Attention that reads the KV of a shared prefix once per step."""

    name = "shared_prefix_attention"
    worker = WorkerPart(install=_install, methods=(coppice_attention_state,), counted=COUNTERS.read)
    stats: SharedPrefixStats = SharedPrefixStats()
    state: AttentionState = "off"

    def environment(self) -> Mapping[str, str]:
        return {ENVIRONMENT: self.settings.of(AttentionSettings).model_dump_json()}

    async def prepare(self) -> None:
        """Ask the first rank: all have the same attention layers."""
        self.state = (await self.engine.call_workers("coppice_attention_state"))[0]

    def status(self) -> Iterable[FeatureStatus]:
        if self.state in UNSUPPORTED:
            return [feature_status(self.name, False, *UNSUPPORTED[self.state])]
        reason = "steps where a measurement shows a gain"
        if self.settings.of(AttentionSettings).shared_prefix == "always":
            reason = "every step with a shared prefix"
        return [
            feature_status(self.name, True, f"used in {reason}", "attention.shared_prefix: off")
        ]

    def on_ping(self, pings: Sequence[Ping]) -> None:
        self.stats = total([aggregate_ranks(each["ranks"]) for each in self.counts(pings)])
