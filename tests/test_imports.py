"""What importing a part of the server pulls in, and what it must not stand in the way of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def imported(statement: str, *paths: Path) -> set[str]:
    """Names of the modules that a fresh interpreter holds after a statement."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    ran = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        env=environ,
        cwd="/",
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module",
    [
        "service.config.settings",
        "service.cli",
        "service.http.serve",
        "service.app",
        "engine.settings",
        "engine.protocol",
        "engine.errors",
    ],
)
def test_the_service_imports_neither_torch_nor_vllm(module: str) -> None:
    modules = imported(f"import {module}", ROOT, ROOT / "client")
    assert module in modules
    assert modules.isdisjoint({"torch", "vllm", "transformers"})


@pytest.mark.parametrize("module", ["service.config.settings", "service.cli", "engine.protocol"])
def test_settings_and_commands_need_no_http_server(module: str) -> None:
    modules = imported(f"import {module}", ROOT, ROOT / "client")
    assert modules.isdisjoint({"fastapi", "uvicorn"})


def test_processes_of_the_engine_import_nothing_of_the_service() -> None:
    """multiprocessing imports in them what the service began with."""
    modules = imported("import service.__main__", ROOT, ROOT / "client")
    assert {name for name in modules if name.partition(".")[0] == "service"} == {
        "service",
        "service.__main__",
        "service.entry",
    }


def test_the_client_imports_nothing_of_the_server() -> None:
    modules = imported("import coppice", ROOT / "client")
    assert modules.isdisjoint({"torch", "vllm", "transformers", "fastapi", "service", "engine"})


def test_transformers_can_be_imported_beside_our_kernels() -> None:
    """transformers looks for another project's package of that name."""
    modules = imported("import kernels, transformers", ROOT)
    assert {"kernels", "transformers"} <= modules


def test_the_kernels_package_is_empty() -> None:
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""
