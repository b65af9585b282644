"""Whether what is compiled is there, and built so that one library does for every processor."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.drafts import store
from kernels.shared_prefix import cpu

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("c++") is None, reason="no C++ compiler"
)


def test_the_kernel_is_built_wherever_there_is_a_compiler() -> None:
    """Elsewhere its tests are skipped, and say so."""
    assert cpu.built(), (
        "scripts/setup.sh builds it, and so does python setup.py build_ext --inplace"
    )
    assert cpu.available() is not None


def test_the_draft_store_is_built_wherever_there_is_a_compiler() -> None:
    assert store.built()


@pytest.mark.slow
def test_what_is_compiled_for_one_processor_is_not_called_on_another(tmp_path: Path) -> None:
    """The linker keeps one of several copies of a template: the one for AVX-512 must not be it."""
    sources = Path(cpu.__file__).parent / "csrc"
    flags = ["-std=c++17", "-O1", "-fno-exceptions", "-mavx2", "-mfma", "-fopenmp"]
    compiled = tmp_path / "avx2.o"
    subprocess.run(["c++", *flags, "-c", sources / "avx2.cpp", "-o", compiled], check=True)
    symbols = subprocess.run(["nm", "-C", compiled], capture_output=True, text=True, check=True)
    shared = [line for line in symbols.stdout.splitlines() if line.split()[-2:-1] in (["W"], ["V"])]
    assert not shared
