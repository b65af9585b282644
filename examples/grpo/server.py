"""Runs a Coppice server in a subprocess while the GRPO example runs."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 180.0
STOP_SECONDS = 60.0
_READY = re.compile(r"ready: serving .* on (http://\S+)")


@contextmanager
def serving(
    folder: Path, *, cpu_threads: int, seed: int, arguments: Sequence[str] = ()
) -> Iterator[str]:
    """Context manager that starts a server, yields its URL once it is ready, and stops it.

    The server's log and uploaded weights are in `folder`.
    """
    log = folder / "server.log"
    command = [sys.executable, "-m", "service", "serve", "--port", "0"]
    command += ["--weights.directory", str(folder / "weights")]
    command += ["--engine.cpu-threads", str(cpu_threads)]
    command += ["--engine.seed", str(seed), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield _url(process, log)
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while (found := _READY.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)
    return found[1]
