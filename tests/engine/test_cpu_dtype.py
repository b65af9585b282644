"""`engine.dtype: auto` on CPUs with and without bfloat16 instructions."""

import logging
from collections.abc import Mapping

import pytest

from engine.launch.arguments import cpu_dtype, engine_arguments
from engine.settings import DType, EngineSettings
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
