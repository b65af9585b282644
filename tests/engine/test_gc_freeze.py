"""Imports with the garbage collector disabled, and enabled again afterwards."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from engine.launch.environment import engine_environment
from engine.runtime import process_setup
from engine.settings import EngineSettings

CHILD = """
import gc, service.__main__
assert not gc.isenabled()
from engine.launch.plugin import install
install()
assert gc.isenabled() and gc.get_freeze_count() > 0
"""


def test_imports_run_without_collections_and_are_frozen() -> None:
    frozen = gc.get_freeze_count()
    with process_setup.gc_disabled_during_imports():
        assert not gc.isenabled()
        kept: list[list[int]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_failed_import_enables_the_collector_again() -> None:
    with pytest.raises(ImportError), process_setup.gc_disabled_during_imports():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.engine
def test_engine_process_collects_after_the_plugin_is_installed(tmp_path: Path) -> None:
    with engine_environment(EngineSettings(), on_cpu=True, temp_dir=tmp_path):
        child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
