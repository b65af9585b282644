"""A real nginx with the example's configuration, in front of the replicas of a test."""

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.tools import ROOT, tool, tool_environment

EXAMPLE = ROOT / "examples" / "fleet" / "nginx.conf"
START_SECONDS = 20.0
# Debian's default paths, which require root.
_FOLDERS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextmanager
def nginx(folder: Path, replicas: Mapping[str, str], *, port: int) -> Iterator[str]:
    """Runs nginx; yields its address. `replicas`: host and port for each name in the example."""
    text = EXAMPLE.read_text()
    for name, place in replicas.items():
        assert f"{name}:8000" in text, name
        text = text.replace(f"{name}:8000", place)
    paths = "".join(f"    {name}_temp_path {folder}/{name};\n" for name in _FOLDERS)
    text = text.replace("http {\n", f"http {{\n    access_log off;\n{paths}", 1)
    text = text.replace("listen 8080;", f"listen 127.0.0.1:{port};")
    file = folder / "nginx.conf"
    file.write_text(f"daemon off;\npid {folder}/nginx.pid;\n{text}")
    log = folder / "nginx.log"
    command = [tool("nginx"), "-c", str(file), "-p", str(folder), "-e", str(log)]
    process = subprocess.Popen(command, env=tool_environment())
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, port, log)
        yield url
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _wait(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """Waits until it listens, without a request: a replica may run in this very thread."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
