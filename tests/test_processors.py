"""Choice of the older processor as which processor-sensitive tests run."""

import pytest

from tests.processors.__main__ import choose
from tests.processors.sitecustomize import PROCESSORS

AVX2 = {"avx2": True, "avx512_f": False}
VNNI = {"avx2": True, "avx512_f": True, "avx512_vnni": True, "avx512_bf16": False}
AMX = {**VNNI, "avx512_bf16": True, "avx512_fp16": True, "amx_tile": True}


def test_each_commit_selects_one_of_all() -> None:
    assert {choose(commit, AMX) for commit in range(4)} == set(PROCESSORS)


def test_newer_processors_and_this_one_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert [choose(commit, VNNI) for commit in range(4)] == ["avx2", "avx512", "avx2", "avx2"]
    assert "processor avx512_bf16: cannot be emulated on this one" in capsys.readouterr().err
    assert choose(0, AVX2) is None
