"""The compiled libraries exist, and one library serves every processor."""

import platform
import subprocess
from pathlib import Path

import pytest

from kernels.draft_index import compiled_store
from kernels.shared_prefix_attention import cpu
from kernels.shared_prefix_attention.cpu import limited
from tests.tools import compiler

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or compiler() is None, reason="no C++ compiler"
)


def test_attention_kernel_is_built_wherever_there_is_a_compiler() -> None:
    """Without one its tests are skipped, with a reason."""
    assert cpu.is_built(), (
        "scripts/setup.sh builds it, and so does python setup.py build_ext --inplace"
    )
    assert cpu.best_isa() is not None


def test_draft_store_is_built_wherever_there_is_a_compiler() -> None:
    assert compiled_store.is_built()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_code_for_one_isa_is_not_called_on_another(tmp_path: Path) -> None:
    """The linker keeps one of several copies of a template: it must not be the AVX-512 one."""
    sources = Path(cpu.__file__).parent / "csrc"
    flags = ["-std=c++17", "-O1", "-fno-exceptions", "-mavx2", "-mfma", "-fopenmp"]
    compiled = tmp_path / "avx2.o"
    subprocess.run(
        [str(compiler()), *flags, "-c", sources / "avx2.cpp", "-o", compiled], check=True
    )
    symbols = subprocess.run(["nm", "-C", compiled], capture_output=True, text=True, check=True)
    shared = [line for line in symbols.stdout.splitlines() if line.split()[-2:-1] in (["W"], ["V"])]
    assert not shared


def test_isa_can_be_limited_for_tests() -> None:
    avx2, avx512 = cpu.Isa.AVX2, cpu.Isa.AVX512_BF16
    assert [limited(avx512, None), limited(avx512, "avx2")] == [avx512, avx2]
    assert [limited(avx2, "avx2"), limited(avx2, "avx512_bf16")] == [avx2, avx2]
    with pytest.raises(ValueError, match="COPPICE_SHARED_PREFIX_ISA must be one of avx2, "):
        limited(avx512, "sse")
