"""Validation of the setting `engine.vllm_args` against vLLM's engine arguments.

An argument is refused, with the reason, if vLLM has no such argument, if its value has another
type, if another setting covers it, or if the server depends on its value.
"""

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from typing import Any, Final, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from vllm import __version__ as vllm_version
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import AsyncEngineArgs

from engine.errors import StartFailed
from engine.features import FEATURES
from engine.launch.chat_template import load_template
from engine.settings import EngineSettings
from engine.settings.vllm_arguments import PASSED_UNCHANGED

COVERED: Final = {
    "max_model_len": "engine.max_context_tokens",
    "data_parallel_size": "engine.data_parallel_size",
    "max_num_seqs": "engine.max_sequences",
    "max_num_batched_tokens": "engine.max_batched_tokens",
    "enforce_eager": "engine.eager",
    "kv_cache_memory_bytes": "engine.cache_bytes",
    "enable_sleep_mode": "engine.enable_sleep_mode",
    "max_num_queued_reqs": "limits.max_samples_running",
    "max_num_queued_tokens": "limits.max_samples_running",
    "logging_config": "log.level",
    "log_level": "log.level",
    "log_config_file": "log.level",
    "hf_token": "the environment variable HF_TOKEN",
    **{name: setting for feature in FEATURES for name, setting in feature.covers.items()},
}
"""Arguments of vLLM that a setting with another name covers."""
_LOGPROBS = "logprobs must be those of the distribution that a request's parameters define"
_METHODS = "the server adds its own methods to vLLM's workers"
_ENGINES = "the server starts all engines of engine.data_parallel_size itself"
_RESTART = "a failed engine ends the service, which its supervisor starts again"
_GENERATION = "the served model generates text and tokens"
OWNED: Final = {
    "worker_cls": _METHODS,
    "worker_extension_cls": _METHODS,
    "scheduler_cls": "the server adds its own methods to vLLM's scheduler process",
    "scheduling_policy": "samples are scheduled by the priority of their group",
    "logprobs_mode": _LOGPROBS,
    "generation_config": _LOGPROBS,
    "override_generation_config": _LOGPROBS,
    "kv_transfer_config": "the server's own connector exports prompt KV; "
    "engine.kv_offload_bytes adds vLLM's offloading connector to it",
    "ec_transfer_config": "each engine runs the encoder of images itself",
    "enable_prefix_caching": "the samples of a group and the turns of a session share prefixes",
    "disable_log_stats": "the server's metrics are made of vLLM's statistics",
    "enable_log_requests": "prompts and responses are never logged",
    "lora_target_modules": "adapters are checked against the modules that the server supports",
    "skip_tokenizer_init": "the server encodes prompts and decodes responses",
    "runner": _GENERATION,
    "convert": _GENERATION,
    "pooler_config": _GENERATION,
    "diffusion_config": _GENERATION,
    "tokens_only": _GENERATION,
    "allowed_local_media_path": "requests never read files of the server",
    "enable_elastic_ep": _RESTART,
    "elastic_ep_max_dp_size": _RESTART,
    "enable_fault_tolerance": _RESTART,
    "fault_tolerance_config": _RESTART,
    "sleep_preserve_parameter_names": "dropped weights are loaded from the active version's files",
}
"""Arguments of vLLM that the server sets, with the reason."""
DATA_PARALLEL: Final = "data_parallel_"


def check_vllm_args(settings: EngineSettings) -> dict[str, Any]:
    """Values of all vLLM arguments in the settings; raises StartFailed with one sentence.

    Also for a chat template that cannot be used.
    """
    load_template(settings.chat_template)
    for name in settings.vllm_args:
        _check_name(name)
    named = {name: getattr(settings, name) for name in PASSED_UNCHANGED}
    passed = {name: value for name, value in named.items() if value is not None}
    checked = {name: _checked(name, value, f"engine.{name}") for name, value in passed.items()}
    return checked | {
        name: _checked(name, value, f"engine.vllm_args.{name}")
        for name, value in settings.vllm_args.items()
    }


def _check_name(name: str) -> None:
    path = f"engine.vllm_args.{name}"
    if name in COVERED:
        raise StartFailed(f"{path}: set {COVERED[name]} instead")
    if name.startswith(DATA_PARALLEL):
        raise StartFailed(f"{path} cannot be set: {_ENGINES}")
    if name in OWNED:
        raise StartFailed(f"{path} cannot be set: {OWNED[name]}")
    if name not in _types():
        close = difflib.get_close_matches(name, _types(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise StartFailed(f"{path}: vLLM {vllm_version} has no such argument{hint}")


@functools.cache
def _types() -> Mapping[str, Any]:
    """Declared type of each engine argument of vLLM, without its internal ones."""
    hints = get_type_hints(
        AsyncEngineArgs, localns={"QuantizationConfigArgs": QuantizationConfigArgs}
    )
    names = (field.name for field in dataclasses.fields(AsyncEngineArgs))
    return {name: hints[name] for name in names if not name.startswith("_")}


def _checked(name: str, value: object, path: str) -> Any:
    """The value in vLLM's type. Text of flags and variables is converted."""
    try:
        return _adapter(name).validate_python(_parsed(value))
    except ValidationError as error:
        raise StartFailed(f"{path}: {_first_error(error)}") from None
    except (ValueError, TypeError) as error:  # vLLM's own checks of a configuration
        raise StartFailed(f"{path}: {error}") from None


def _adapter(name: str) -> TypeAdapter[Any]:
    hint = _types()[name]
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:  # a type of torch
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def _parsed(value: object) -> object:
    """The list or mapping that a text holds; any other value unchanged."""
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    return f"{place}: {message}" if place else message
