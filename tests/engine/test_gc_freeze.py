"""Imports without the garbage collector, which works again behind them."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from engine.launch.environment import engine_environment
from engine.runtime import gc_freeze
from engine.settings import AttentionSettings, EngineSettings

CHILD = """
import gc, service.entry
assert not gc.isenabled()
from engine.launch.plugin import install
install()
assert gc.isenabled() and gc.get_freeze_count() > 0
"""


def test_nothing_is_collected_during_imports_and_what_they_made_is_left_alone() -> None:
    frozen = gc.get_freeze_count()
    with gc_freeze.gc_disabled_during_imports():
        assert not gc.isenabled()
        kept: list[list[int]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), gc_freeze.gc_disabled_during_imports():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.engine
def test_a_process_of_the_engine_collects_once_the_plugin_is_installed(tmp_path: Path) -> None:
    with engine_environment(
        EngineSettings(), attention=AttentionSettings(), on_cpu=True, temp_dir=tmp_path
    ):
        child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
