"""The error of coppice.train without torch or transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CLIENT = Path(__file__).parents[2] / "client"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_dependency_names_the_extra(missing: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; import coppice; import coppice.train"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(CLIENT)},
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: coppice.train needs {missing}: pip install 'coppice-client[train]'"
    )
