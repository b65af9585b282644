"""Processes of a run, each in a session of its own, with a time limit and a log."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

import psutil

ROOT: Final = Path(__file__).parents[2]
POLL_SECONDS: Final = 0.1


@dataclass(slots=True, kw_only=True)
class Job:
    """A running module, whose end is polled; it is killed at its deadline.

    `deadline` is on the monotonic clock. Standard error goes to OUT/NAME.log. A module receives
    commands as lines of its standard input.
    """

    name: str
    deadline: float
    process: "subprocess.Popen[bytes]"
    began: float
    result: dict[str, Any] | None = None

    @classmethod
    def start(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        out: Path,
        until: float,
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Start `python -m ARGUMENTS`, for at most `seconds` and not beyond `until`."""
        with (out / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment or {}),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        now = time.monotonic()
        print(f"  {name}: started", flush=True)
        return cls(name=name, deadline=min(until, now + seconds), process=process, began=now)

    def send(self, line: str) -> None:
        """Send a command. One to a process that has ended is lost."""
        with suppress(BrokenPipeError, ValueError):
            self._input.write(f"{line}\n".encode())
            self._input.flush()

    def close_input(self) -> None:
        """End of the commands: the process finishes its work and ends."""
        with suppress(BrokenPipeError):
            self._input.close()

    @property
    def _input(self) -> IO[bytes]:
        assert self.process.stdin is not None, "a pipe by construction"
        return self.process.stdin

    def poll(self) -> bool:
        """True if the process has ended, or is killed now because its deadline has passed."""
        if self.result is None:
            status = self.process.poll()
            if status is None and time.monotonic() < self.deadline:
                return False
            self._end("stopped" if status is None else "failed" if status else "done")
        return True

    @property
    def has_failed(self) -> bool:
        return self.result is not None and self.result["status"] == "failed"

    def stop(self) -> None:
        if not self.poll():
            self._end("stopped")

    def _end(self, status: str) -> None:
        kill_session(self.process)
        self.close_input()
        seconds = round(time.monotonic() - self.began, 1)
        self.result = {"status": status, "seconds": seconds}
        print(f"  {self.name}: {status} after {seconds} s", flush=True)


def wait_for(jobs: Iterable[Job]) -> None:
    """Wait until all processes have ended or are stopped at their deadlines."""
    running = list(jobs)
    while running := [job for job in running if not job.poll()]:
        time.sleep(POLL_SECONDS)


def kill_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it leaves behind; vLLM's EngineCore has a process group of its own.

    A child whose parent has ended is found by its session, if not by its parent.
    """
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid).children(recursive=True)
    for each in [*found, *_members(process.pid)]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def _members(session: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session:
                members.append(process)
    return members


def write_json(file: Path, content: object) -> None:
    """Replace a file at once, so that it is complete at any time."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)


def read_json(file: Path) -> Any:
    """Content of a file, or None if it was not written."""
    return json.loads(file.read_text()) if file.exists() else None
