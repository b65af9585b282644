import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import coppice
from coppice import AsyncPending, AsyncRollouts, Pending, Rollouts, public

HEAVY = ("torch", "vllm", "transformers", "fastapi", "tqdm")


def methods_of(client: type) -> set[str]:
    return {
        name for name, value in inspect.getmembers(client) if name[0] != "_" and callable(value)
    }


def test_all_lists_public_names_in_order() -> None:
    names = [
        name
        for name, value in vars(public).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
    assert coppice.__all__ == sorted(names)


def test_both_clients_have_the_same_methods() -> None:
    assert methods_of(Rollouts) - {"close"} == methods_of(AsyncRollouts) - {"aclose"}


@pytest.mark.parametrize("name", sorted(methods_of(Rollouts) - {"close"}))
def test_both_clients_have_the_same_arguments(name: str) -> None:
    blocking, awaited = getattr(Rollouts, name), getattr(AsyncRollouts, name)
    assert inspect.signature(blocking).parameters == inspect.signature(awaited).parameters
    assert blocking.__doc__ == awaited.__doc__
    assert blocking.__doc__


def test_both_handles_have_the_same_methods() -> None:
    assert methods_of(Pending) == methods_of(AsyncPending)
    for name in methods_of(Pending):
        blocking, awaited = getattr(Pending, name), getattr(AsyncPending, name)
        assert inspect.signature(blocking) == inspect.signature(awaited)
        assert blocking.__doc__ == awaited.__doc__


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    path = {"PYTHONPATH": str(coppice.__path__[0]) + "/.."}
    return subprocess.run(command, env=path, capture_output=True, text=True, timeout=60)


def test_import_loads_no_heavy_module() -> None:
    done = run(f"import sys, coppice; print([name for name in {HEAVY} if name in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_progress_without_tqdm_names_the_package() -> None:
    done = run(
        "import sys, coppice\n"
        "sys.modules['tqdm'] = None\n"
        "coppice.Rollouts('http://nowhere.invalid').rollout(['hello'], progress=True)\n"
    )
    assert done.stderr.splitlines()[-1] == (
        "ImportError: progress=True needs tqdm: pip install 'coppice-client[progress]'"
    )
