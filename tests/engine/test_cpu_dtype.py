"""`engine.dtype: auto` and `engine.quantization`, by the instructions of a CPU."""

import logging
from collections.abc import Mapping
from contextlib import nullcontext

import pytest

from engine.errors import StartFailed
from engine.launch.arguments import cpu_dtype
from engine.settings import DType, EngineSettings
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL

AVX2: Mapping[str, object] = {"avx2": True, "avx512_bf16": False, "amx_bf16": False}
AVX512: Mapping[str, object] = {"avx2": True, "avx512_bf16": True, "amx_bf16": False}
ARM: Mapping[str, object] = {"neon": True, "bf16": False}
ARM_BF16: Mapping[str, object] = {"neon": True, "bf16": True}
POWER: Mapping[str, object] = {"architecture": "ppc64le"}


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (AVX2, "float32"),
        (AVX512, "auto"),
        (ARM, "float32"),
        (ARM_BF16, "auto"),
        (POWER, "auto"),
    ],
)
def test_auto_is_float32_without_bfloat16_instructions(
    capabilities: Mapping[str, object], expected: str
) -> None:
    assert cpu_dtype("auto", capabilities) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_explicit_dtype_is_obeyed(dtype: DType) -> None:
    assert cpu_dtype(dtype, AVX2) == dtype


def test_choice_and_its_reason_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="engine"):
        cpu_dtype("bfloat16", AVX2)
        cpu_dtype("auto", AVX512)
        assert caplog.text == ""
        cpu_dtype("auto", AVX2)
    assert "engine.dtype auto is float32: this CPU has no bfloat16 instructions" in caplog.text


@pytest.mark.parametrize(("on_cpu", "expected"), [(True, "float32"), (False, "auto")])
def test_only_a_cpu_engine_depends_on_its_instructions(on_cpu: bool, expected: str) -> None:
    arguments = engine_arguments(EngineSettings(), MODEL, on_cpu=on_cpu, capabilities=AVX2)
    assert arguments.dtype == expected


@pytest.mark.parametrize("has_float16", [True, False])
def test_fp8_is_refused_where_its_first_request_would_end_the_engine(has_float16: bool) -> None:
    capabilities = {"avx512_bf16": True, "avx512_fp16": has_float16}
    settings = EngineSettings(quantization="fp8_per_channel")
    with nullcontext() if has_float16 else pytest.raises(StartFailed, match="no AVX512_FP16"):
        engine_arguments(settings, MODEL, on_cpu=True, capabilities=capabilities)
    engine_arguments(settings, MODEL, on_cpu=False, capabilities=capabilities)
