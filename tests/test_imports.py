"""Modules that an import of the server's packages loads, and names that they must not shadow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def imported(statement: str, *paths: Path) -> set[str]:
    """Names of the modules loaded in a fresh interpreter after a statement."""
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


def modules_of(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def test_service_imports_neither_torch_nor_vllm() -> None:
    service = modules_of("service")
    protocol = ["engine.settings", "engine.protocol", "engine.types.samples", "engine.errors"]
    statement = f"import {', '.join([*service, *protocol, 'engine.types.feature_stats'])}"
    modules = imported(statement, ROOT, ROOT / "client")
    assert modules.issuperset(service)
    assert modules.isdisjoint({"torch", "vllm", "transformers"})


def test_settings_and_commands_need_no_http_server() -> None:
    statement = "import service.config.settings, service.cli, engine.protocol"
    modules = imported(statement, ROOT, ROOT / "client")
    assert modules.isdisjoint({"fastapi", "uvicorn"})


def test_engine_processes_import_no_service_module() -> None:
    """multiprocessing imports the parent's main module in its children."""
    modules = imported("import service.__main__", ROOT, ROOT / "client")
    assert {name for name in modules if name.partition(".")[0] == "service"} == {
        "service",
        "service.__main__",
    }


def test_client_imports_no_server_module() -> None:
    modules = imported("import coppice", ROOT / "client")
    assert modules.isdisjoint({"torch", "vllm", "transformers", "fastapi", "service", "engine"})


def test_transformers_imports_beside_the_kernels_package() -> None:
    """transformers probes for another project's package named `kernels`."""
    modules = imported("import kernels, transformers", ROOT)
    assert {"kernels", "transformers"} <= modules


def test_kernels_package_init_is_empty() -> None:
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""


def check_config_with(*paths: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    command = [sys.executable, "-m", "service", "check-config"]
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd="/")


def test_command_explains_that_another_coppice_is_installed(tmp_path: Path) -> None:
    """The distribution `coppice` on PyPI replaces files of coppice-client."""
    package = tmp_path / "coppice"
    package.mkdir()
    (package / "__init__.py").write_text("class DecisionTreeClassifier: ...\n")
    ran = check_config_with(tmp_path)
    assert ran.returncode == 1
    assert "pip uninstall coppice" in ran.stderr and str(package) in ran.stderr
    assert "Traceback" not in ran.stderr


def test_error_of_a_missing_dependency_of_the_client_is_not_hidden(tmp_path: Path) -> None:
    package = tmp_path / "coppice"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_dependency\n")
    ran = check_config_with(tmp_path)
    assert "No module named 'no_such_dependency'" in ran.stderr
    assert "pip uninstall" not in ran.stderr
