"""Both distributions build, contain the expected files, and work outside the checkout."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.docker.test_images import FILES, stages
from tests.tools import compiler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
SOURCES = {
    "LICENSE",
    "setup.py",
    "service/openapi.yaml",
    "service/ui/page.html",
    "examples/seedling/model/model.safetensors",
    "kernels/draft_index/csrc/draft_store.h",
    "kernels/shared_prefix_attention/csrc/avx2.cpp",
}
"""Some files that a source distribution must contain, besides modules."""


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ = inherited | environ
    ran = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def copied(tmp_path: Path, source: Path) -> Path:
    """A copy of the sources: a build writes files beside them and picks up stale ones."""
    stale = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.so")
    return Path(shutil.copytree(source, tmp_path / "source", ignore=stale))


def built(tmp_path: Path, source: Path, **environ: str) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(
        *pip,
        "--no-index",
        "--wheel-dir",
        tmp_path,
        copied(tmp_path, source),
        cwd=tmp_path,
        **environ,
    )
    [wheel] = tmp_path.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("client"), ROOT / "client")


@pytest.fixture(scope="module")
def server_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    return built(folder, ROOT, CXX=str(hasty(folder)))


def compiles() -> bool:
    return platform.machine() == "x86_64" and compiler() is not None


def hasty(tmp_path: Path) -> Path:
    """A compiler without optimisation, which takes most of a build's time. Nothing is executed."""
    compiler = tmp_path / "hasty-c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    return compiler


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def environment(directory: Path) -> Path:
    """A bare environment with this project's dependencies, but without its editable installs."""
    venv.create(directory, with_pip=False)
    [packages] = directory.glob("lib/python*/site-packages")
    # Directories named in a .pth file are added to sys.path, but the .pth files in those
    # directories (the editable installs) are not processed.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory


def install(wheel: Path, directory: Path) -> Path:
    python = environment(directory) / "bin" / "python"
    target = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", target.strip(), wheel, cwd=directory)
    return python


def pins(lock: Path) -> dict[str, list[str]]:
    """Hashes of each pinned package of a lock file."""
    found: dict[str, list[str]] = {}
    for line in lock.read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line):
            hashes = found.setdefault(f"{match[1]}=={match[2]}", [])
        elif match := re.match(r" +--hash=sha256:([0-9a-f]{64})", line):
            hashes.append(match[1])
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_locked_package_has_hashes(lock: Path) -> None:
    found = pins(lock)
    assert found
    assert not [pin for pin, hashes in found.items() if not hashes]


def test_torch_for_cpus_is_the_version_that_the_distribution_requires() -> None:
    """Its hashes are written by hand: two Pythons on two architectures."""
    [(pin, hashes)] = pins(ROOT / "requirements" / "torch-cpu.txt").items()
    assert len(set(hashes)) == 4
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert pin.removesuffix("+cpu") in dependencies


def test_cuda_python_is_a_metapackage_of_the_locked_bindings() -> None:
    """Until 12.6 it has files of its own, which are those of cuda-bindings."""
    versions = dict(pin.split("==") for pin in pins(ROOT / "requirements" / "gpu.txt"))
    assert versions["cuda-python"] == versions["cuda-bindings"]


@pytest.mark.parametrize(
    "file",
    ["scripts/setup.sh", "scripts/beside.sh", "docker/cpu.Dockerfile", "docker/gpu.Dockerfile"],
)
def test_lock_files_are_installed_with_their_hashes(file: str) -> None:
    joined = (ROOT / file).read_text().replace("\\\n", " ")
    installs = [
        line for line in re.split(r"\n|&&|\|\|", joined) if "pip" in line and " -r " in line
    ]
    assert installs
    assert all("--no-deps --require-hashes" in line for line in installs)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_make_wheels_builds_the_same_files_again(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "wheels.py"
    environ = {"CXX": str(hasty(tmp_path))} if compiles() else {}
    for name in ("first", "second"):
        run(sys.executable, script, "--out", tmp_path / name, cwd=tmp_path, **environ)
    first, second = (sorted((tmp_path / name).iterdir()) for name in ("first", "second"))
    assert [file.name.partition("-")[0] for file in first] == ["coppice_client"] * 2 + [
        "coppice_rl"
    ] * 2
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    [sdist] = (tmp_path / "first").glob("coppice_rl-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert names >= SOURCES
    assert not [name for name in names if name.startswith(("tests/", "bench/", "client/", "docs/"))]


def test_client_wheel_contains_only_the_client(client_wheel: Path) -> None:
    names = contents(client_wheel)
    assert {"coppice/__init__.py", "coppice/py.typed", "coppice/wire/rollouts.py"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"coppice", "coppice_client"}


@pytest.mark.exhaustive
def test_server_wheel_contains_packages_type_markers_and_seedling(
    server_wheel: Path,
) -> None:
    names = contents(server_wheel)
    assert {
        "service/cli.py",
        "service/openapi.yaml",
        "service/py.typed",
        "service/ui/page.html",
        "service/ui/page.js",
        "service/api_docs/page.html",
        "service/api_docs/swagger-ui-bundle.js",
        "service/api_docs/LICENSE",
        "engine/protocol/__init__.py",
        "engine/py.typed",
        "kernels/__init__.py",
        "examples/seedling/model/config.json",
        "examples/seedling/model/model.safetensors",
    } <= names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "coppice/"))]


@pytest.mark.exhaustive
@pytest.mark.skipif(not compiles(), reason="no C++ compiler")
def test_server_wheel_contains_compiled_libraries_and_is_tagged_py3(server_wheel: Path) -> None:
    libraries = {
        "kernels/shared_prefix_attention/libshared_prefix_attention.so",
        "kernels/draft_index/libdraft_index.so",
    }
    assert libraries <= contents(server_wheel)
    assert "-py3-none-linux_" in server_wheel.name


@pytest.mark.exhaustive
@pytest.mark.skipif(not compiles(), reason="no C++ compiler")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_copied_into_an_image_build_the_complete_wheel(file: Path, tmp_path: Path) -> None:
    source = tmp_path / "image"
    for places in (rest.split() for name, rest in stages(file)[0] if name == "COPY"):
        for place in places[:-1]:
            target = source / places[-1]
            if (ROOT / place).is_dir():
                shutil.copytree(ROOT / place, target, symlinks=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / place, target)
    names = contents(built(tmp_path, source, CXX=str(hasty(tmp_path))))
    libraries = {
        "kernels/shared_prefix_attention/libshared_prefix_attention.so",
        "kernels/draft_index/libdraft_index.so",
    }
    assert libraries | {"service/openapi.yaml", "examples/seedling/model/config.json"} <= names


@pytest.mark.exhaustive
@pytest.mark.skipif(not compiles(), reason="no C++ compiler")
def test_compiled_kernel_is_found_outside_the_checkout(server_wheel: Path, tmp_path: Path) -> None:
    python = install(server_wheel, tmp_path / "env")
    script = "from kernels.shared_prefix_attention import cpu; print(cpu.LIBRARY, cpu.is_built())"
    where, built = run(python, "-c", script, cwd=tmp_path).split()
    assert Path(where).is_relative_to(tmp_path) and built == "True"


@pytest.mark.exhaustive
def test_server_wheel_builds_without_a_compiler(tmp_path: Path) -> None:
    environ = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    wheel = built(tmp_path, ROOT, **environ)
    assert "service/cli.py" in contents(wheel)
    assert not [name for name in contents(wheel) if name.endswith(".so")]


def test_client_works_outside_the_checkout(client_wheel: Path, tmp_path: Path) -> None:
    python = install(client_wheel, tmp_path / "env")
    where = run(
        python, "-c", "import coppice, coppice.wire.rollouts; print(coppice.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(tmp_path)


@pytest.mark.exhaustive
def test_server_works_outside_the_checkout(
    client_wheel: Path, server_wheel: Path, tmp_path: Path
) -> None:
    python = install(server_wheel, tmp_path / "env")
    target = next((tmp_path / "env").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(client_wheel) as wheel:
        wheel.extractall(target)
    script = "import service; from service.cli import main; print(service.__file__); main()"
    where, *tree = run(python, "-c", script, "check-config", cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert "  port: 8000" in tree
