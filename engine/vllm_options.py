"""Feature classes of plain vLLM options, for status only: quantization, expert parallel, ..."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
from vllm.engine.arg_utils import AsyncEngineArgs

from engine.errors import StartFailed
from engine.feature_base import EngineFeature, feature_status
from engine.types.feature_stats import FeatureStatus

State = tuple[object, str, str]
"""State of an option (true if it is on), its reason, and the setting that changes it."""


class VllmOption(EngineFeature, ABC):
    """An option of vLLM. `state` follows from the settings and vLLM's configuration."""

    def status(self) -> Iterable[FeatureStatus]:
        yield feature_status(self.name, *self.state())

    @abstractmethod
    def state(self) -> State: ...

    @property
    def _config(self) -> Any:
        return self.engine.llm.vllm_config


class RandomWeights(VllmOption):
    """Weights that no file has."""

    name = "random_weights"

    def state(self) -> State:
        is_on = self.settings.engine.has_random_weights
        loaded = "the model's files are loaded"
        reason = "no weights are loaded: benchmarks only" if is_on else loaded
        return is_on, reason, "engine.load_format"


class Quantization(VllmOption):
    """Quantized weights."""

    name = "quantization"

    def state(self) -> State:
        model, how = self._config.model_config, "engine.quantization"
        method = model.quantization
        if _quantizes_experts_only(model) and not model.is_moe:
            return False, f"{method}: the model has no experts", how
        origin = "the model's config.json: its weights cannot be updated"
        if self.settings.engine.quantization:
            origin = how
        return method, f"{method}, from {origin}" if method else "weights are not quantized", how


def _quantizes_experts_only(model_config: Any) -> bool:
    """True for a method of vLLM that quantizes on loading, but no linear layers."""
    if model_config.quantization not in ONLINE_QUANT_SHORTHAND_NAMES:
        return bool(model_config.quantization == "experts_int8")
    layers = model_config.quantization_config
    return layers is not None and layers.linear is None and layers.targets is None


class QuantizedKvCache(VllmOption):
    """Quantized KV cache."""

    name = "quantized_kv_cache"

    def state(self) -> State:
        dtype, how = self.settings.engine.kv_cache_dtype, "engine.kv_cache_dtype"
        return dtype not in ("auto", "float16", "bfloat16"), f"{how} is {dtype}", how


class ExpertParallel(VllmOption):
    """Experts that are distributed over the ranks."""

    name = "expert_parallel"

    def state(self) -> State:
        settings, how = self.settings.engine, "engine.enable_expert_parallel"
        if not settings.enable_expert_parallel:
            return False, f"{how} is false", how
        if not self._config.model_config.is_moe:
            return False, "the model has no experts", ""
        if settings.tensor_parallel_size == 1:
            return False, "engine.tensor_parallel_size is 1", "engine.tensor_parallel_size"
        return True, f"{how} is true", how


class RoutedExperts(VllmOption):
    """Experts that each token was routed to."""

    name = "routed_experts"
    covers = {"enable_return_routed_experts": "engine.return_routed_experts"}

    def set_arguments(self, arguments: AsyncEngineArgs, *, on_cpu: bool) -> None:
        settings = self.settings.engine
        if settings.return_routed_experts and settings.kv_offload_bytes is not None:
            raise StartFailed(
                "engine.return_routed_experts and engine.kv_offload_bytes exclude each other: KV "
                "that is loaded from host memory has no experts; unset one of them"
            )

    def info_fields(self) -> Mapping[str, Any]:
        return {"returns_routed_experts": self.settings.engine.return_routed_experts}

    def state(self) -> State:
        is_on, how = self.settings.engine.return_routed_experts, "engine.return_routed_experts"
        return is_on, f"{how} is {str(is_on).lower()}", how


class AsyncScheduling(VllmOption):
    """Scheduling of a step while the one before it runs."""

    name = "async_scheduling"

    def state(self) -> State:
        value, how = self.settings.engine.async_scheduling, "engine.async_scheduling"
        reason = f"{how} is {str(value).lower()}" if value is not None else "chosen by vLLM"
        return self._config.scheduler_config.async_scheduling, reason, how


class ToolParser(VllmOption):
    """Parser of tool calls."""

    name = "tool_parser"

    def state(self) -> State:
        parser = self.settings.engine.tool_parser
        reason = f"{parser} parses tool calls" if parser else "tool calls stay in the text"
        return parser, reason, "engine.tool_parser"


class ReasoningParser(VllmOption):
    """Parser of reasoning."""

    name = "reasoning_parser"

    def state(self) -> State:
        parser = self.settings.engine.reasoning_parser
        reason = f"{parser} parses reasoning" if parser else "reasoning stays in the text"
        return parser, reason, "engine.reasoning_parser"
