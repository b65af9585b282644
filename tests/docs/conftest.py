"""Execution of documentation blocks in a copy of the tree, and the server that they talk to.

The copy's `.venv` contains the dependencies of this one, so that neither the checkout nor its
environment is changed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.blocks import ROOT, Block
from tests.ports import free_port

RUNNER = Path(__file__).with_name("page_runner.py")
ADDRESS = "127.0.0.1:8000"
PAGE_SECONDS = 900.0
START_SECONDS = 900.0
STOP_SECONDS = 60.0
STATE = ("/v1/weights", "/v1/adapters")
NOT_COPIED = shutil.ignore_patterns(
    *(".git", ".venv", ".[a-z]*_cache", ".clients", ".verl", ".miles", ".arctic", ".hypothesis"),
    *(".work", "build", "dist", "__pycache__", "*.egg-info"),
)

# Processes that vLLM spawns import the main module again.
SCRIPT = """#!{python}
import sys
from {module} import main
if __name__ == "__main__":
    sys.exit(main())
"""


def environment(tree: Path) -> dict[str, str]:
    """The environment of a user in the clone, with a cache of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {
        "PATH": f"{tree / '.venv' / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(tree / ".venv"),
        "XDG_CACHE_HOME": str(tree.parent / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def make_environment(tree: Path) -> None:
    """An environment for the copy in which `make` finds everything installed.

    Directories named in a .pth file are added to sys.path, but the .pth files in those directories
    (the editable installs of the checkout) are not processed.
    """
    place = tree / ".venv"
    venv.create(place, with_pip=False, symlinks=True)
    [packages] = place.glob("lib/python*/site-packages")
    lines = [tree, tree / "client", sysconfig.get_path("purelib")]
    (packages / "copy.pth").write_text("".join(f"{line}\n" for line in lines))
    for name, module in (("coppice", "service.__main__"), ("pip", "pip._internal.cli.main")):
        command = place / "bin" / name
        command.write_text(SCRIPT.format(python=place / "bin" / "python", module=module))
        command.chmod(0o755)
    for stamp in ("base.stamp", "serve.stamp"):
        text = (ROOT / ".venv" / stamp).read_text()
        (place / stamp).write_text(text.replace(str(ROOT), str(tree)))


def installed_device() -> str:
    """The device that the checkout's environment was made for, also on a machine with a GPU."""
    return (ROOT / ".venv" / "base.stamp").read_text().split()[2]


def copy_tree(target: Path) -> Path:
    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=NOT_COPIED))


class DocServer:
    """The server of a tree's `make serve`; started when it is needed."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._process: subprocess.Popen[bytes] | None = None
        self._state: list[object] = []
        self.address = ""

    def start(self) -> None:
        if self._process is not None:
            return
        log = self._tree.parent / "server.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                ["make", "serve", f"PORT={free_port()}", f"DEVICE={installed_device()}"],
                cwd=self._tree,
                env=environment(self._tree),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while (found := re.search(r"ready: .* on http://(\S+)", log.read_text())) is None:
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self.address = found[1]
        self._state = self._current_state()

    def stop(self) -> None:
        if self._process is not None:
            stop(self._process)
        self._process = None

    def stop_if_changed(self) -> None:
        """Other weights or adapters would be found by the next page."""
        if self._process is not None and self._current_state() != self._state:
            self.stop()

    def _current_state(self) -> list[object]:
        answers = [httpx.get(f"http://{self.address}{path}") for path in STATE]
        return [answer.json() if answer.is_success else None for answer in answers]


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process and everything that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait(STOP_SECONDS)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("docs") / "coppice")
    make_environment(tree)
    return tree


@pytest.fixture(scope="module")
def server(tree: Path) -> Iterator[DocServer]:
    server = DocServer(tree)
    yield server
    server.stop()


def run_page(executed: list[Block], address: str, tree: Path, folder: Path) -> tuple[bool, str]:
    """Run the blocks in a copy of their own; whether all succeeded, and what was written."""
    copy = copy_tree(folder / "coppice")
    (copy / ".venv").symlink_to(tree / ".venv")
    parts = [
        {name: getattr(block, name) for name in ("page", "line", "language", "place")}
        | {"text": block.text.replace(ADDRESS, address)}
        for block in executed
    ]
    (folder / "blocks.json").write_text(json.dumps(parts))
    log = folder / "page.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [tree / ".venv" / "bin" / "python", RUNNER, folder / "blocks.json"],
            cwd=copy,
            env=environment(tree) | {"COPPICE_SERVER__PORT": address.rpartition(":")[2]},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        succeeded = process.wait(PAGE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        succeeded = False
    finally:
        stop(process)
    return succeeded, log.read_text()


def last_block(log: str) -> str:
    return log.rpartition("\n--- ")[2].removeprefix("--- ")
