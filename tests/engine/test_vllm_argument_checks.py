"""Engine arguments of vLLM in the settings: passed exactly, or refused with one sentence."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs

from engine.errors import StartFailed
from engine.launch import vllm_argument_checks
from engine.settings import EngineSettings
from engine.settings.vllm_arguments import PASSED_UNCHANGED
from service.serve_components import ServeComponents
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL
from tests.service.command_line import run_command

ROOT = Path(__file__).parents[2]


def arguments(**changes: Any) -> AsyncEngineArgs:
    return engine_arguments(EngineSettings(**changes), MODEL, on_cpu=True)


def refusal(**vllm: Any) -> str:
    with pytest.raises(StartFailed) as caught:
        arguments(vllm_args=vllm)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("stream_interval", 4, 4),
        ("stream_interval", "4", 4),
        ("disable_cascade_attn", "true", True),
        ("watermark", "0.25", 0.25),
        ("cpu_offload_params", ["w1", "w2"], {"w1", "w2"}),
        ("additional_config", '{"a": [1, 2]}', {"a": [1, 2]}),
        ("model_class_overrides", {"A": "m:B"}, {"A": "m:B"}),
        ("tokenizer_revision", "7", "7"),
        ("lora_dtype", "bfloat16", "bfloat16"),
        ("moe_backend", "triton", "triton"),
    ],
)
def test_value_reaches_vllm_in_its_type(name: str, given: object, value: object) -> None:
    passed = getattr(arguments(vllm_args={name: given}), name)
    assert (passed, type(passed)) == (value, type(value))


def test_configuration_object_is_made_of_a_mapping() -> None:
    config = arguments(vllm_args={"compilation_config": {"mode": 0}}).compilation_config
    assert config.mode == 0 and config.cudagraph_capture_sizes is None


def test_value_replaces_the_one_that_the_server_passes() -> None:
    assert arguments().use_tqdm_on_load is False
    assert arguments(vllm_args={"use_tqdm_on_load": True}).use_tqdm_on_load is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("load_format", "runai_streamer"),
        ("load_format", "dummy"),
        ("trust_remote_code", True),
        ("tokenizer", "/t"),
        ("enable_expert_parallel", True),
        ("async_scheduling", False),
    ],
)
def test_setting_reaches_vllm_under_either_name(name: str, value: object) -> None:
    assert name in PASSED_UNCHANGED
    assert getattr(arguments(**{name: value}), name) == value
    assert getattr(arguments(vllm_args={name: value}), name) == value


def test_every_setting_passed_unchanged_is_an_argument_of_vllm() -> None:
    assert set(PASSED_UNCHANGED) <= vllm_argument_checks._types().keys()


def test_by_default_vllm_decides_about_async_scheduling_and_runs_no_code_of_models() -> None:
    assert arguments().async_scheduling is None
    assert arguments().load_format == "safetensors"
    assert arguments().trust_remote_code is False


def test_unknown_argument_is_refused_with_close_matches() -> None:
    assert re.fullmatch(
        r"engine\.vllm_args\.disable_cascade_attnn: vLLM \S+ has no such argument; "
        r"did you mean disable_cascade_attn\?",
        refusal(disable_cascade_attnn=1),
    )
    assert refusal(zzzz=1).endswith("has no such argument")
    assert refusal(_api_process_count=2).startswith("engine.vllm_args._api_process_count: vLLM")


@pytest.mark.parametrize(
    ("vllm", "text"),
    [
        ({"stream_interval": "x"}, "engine.vllm_args.stream_interval: Input should be a valid int"),
        ({"mamba_config": {"x": 1}}, "engine.vllm_args.mamba_config: x: Unexpected keyword"),
        ({"all2all_backend": "x"}, "engine.vllm_args.all2all_backend: Input should be '"),
        ({"stream_interval": None}, "engine.vllm_args.stream_interval: Input should be a valid"),
        ({"quantization": 8}, "engine.quantization: Input should be a valid string"),
    ],
)
def test_wrong_type_is_refused_with_the_place(vllm: dict[str, Any], text: str) -> None:
    if "quantization" in vllm:
        with pytest.raises(ValueError, match="valid string"):
            EngineSettings(vllm_args=vllm)
    else:
        assert refusal(**vllm).startswith(text)


def test_setting_passed_unchanged_is_checked_against_the_type_of_vllm() -> None:
    with pytest.raises(StartFailed, match=r"^engine\.kv_cache_dtype: Input should be 'auto'"):
        arguments(kv_cache_dtype="int3")


@pytest.mark.parametrize("name", sorted(vllm_argument_checks.COVERED))
def test_argument_of_a_setting_with_another_name_is_refused_with_that_name(name: str) -> None:
    assert refusal(**{name: 1}) == (
        f"engine.vllm_args.{name}: set {vllm_argument_checks.COVERED[name]} instead"
    )


@pytest.mark.parametrize("name", [*sorted(vllm_argument_checks.OWNED), "data_parallel_rank"])
def test_argument_of_the_server_is_refused_with_the_reason(name: str) -> None:
    reason = vllm_argument_checks.OWNED.get(name, "engine.data_parallel_size")
    text = refusal(**{name: 1})
    assert text.startswith(f"engine.vllm_args.{name} cannot be set: ") and reason in text


def test_refused_names_are_arguments_of_vllm() -> None:
    assert (
        vllm_argument_checks.COVERED.keys() | vllm_argument_checks.OWNED.keys()
    ) <= vllm_argument_checks._types().keys()


def test_names_of_the_settings_in_the_refusals_exist() -> None:
    from service.config.settings import settings_fields

    known = {f"{section}.{name}" for section, name, _ in settings_fields()}
    named = {path for path in vllm_argument_checks.COVERED.values() if "variable" not in path}
    assert named <= known


def test_everything_that_the_server_sets_is_covered_owned_or_meant_to_be_replaced() -> None:
    """A new argument of the server must be classified here."""
    plain = AsyncEngineArgs(model=str(MODEL))
    ours = engine_arguments(EngineSettings(max_adapters=1), MODEL, on_cpu=True)
    different = {name for name in vllm_argument_checks._types() if _differs(plain, ours, name)}
    from engine.settings.vllm_arguments import SAME_NAMES

    replaceable = {"use_tqdm_on_load"}
    known = vllm_argument_checks.COVERED.keys() | vllm_argument_checks.OWNED.keys() | SAME_NAMES
    assert different - known == replaceable


def _differs(one: AsyncEngineArgs, other: AsyncEngineArgs, name: str) -> bool:
    values = getattr(one, name), getattr(other, name)
    return isinstance(values[1], str | int | float | list | None) and values[0] != values[1]


def test_no_caller_reaches_an_engine_argument() -> None:
    """No request or response of the HTTP API has a field of an engine argument of vLLM.

    A rollout's own `logprobs_mode` adds logprobs to its answer only.
    """
    document = yaml.safe_load((ROOT / "openapi.yaml").read_text(encoding="utf-8"))
    fields = set(_property_names(document))
    sensitive = {"trust_remote_code", "hf_overrides", "load_format", "vllm_args", "quantization"}
    engine_arguments = (sensitive | vllm_argument_checks.OWNED.keys()) - {"logprobs_mode"}
    assert len(fields) > 100 and not fields & engine_arguments


def _property_names(tree: object) -> Iterator[str]:
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return
    for name, below in tree.items():
        if name == "properties" and isinstance(below, dict):
            yield from below
        yield from _property_names(below)


def test_bad_argument_ends_the_start_with_one_sentence_and_code_1() -> None:
    components = ServeComponents(configure_logging=lambda _: None)
    flags = ("--port", "0", "--engine.vllm-args", "{worker_cls: x}")
    result = run_command("serve", *flags, components=components)
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("coppice:")]
    assert lines == [
        "coppice: engine.vllm_args.worker_cls cannot be set: the server adds its own methods to "
        "vLLM's workers"
    ]
    assert "Traceback" not in result.stderr


def test_check_config_refuses_what_the_start_refuses() -> None:
    result = run_command("check-config", "--engine.vllm-args", "{no_such: 1}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "coppice: engine.vllm_args.no_such: vLLM 0.32" in result.stderr
