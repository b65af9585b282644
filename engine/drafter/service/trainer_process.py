"""Supervisor of the drafter's trainer process: start, messages, restart and stop.

Samples are written to a pipe without waiting: those that do not fit are dropped and counted. If the
process exits by itself it is restarted, up to MAX_STARTS starts.
"""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.drafter.trainer.messages import (
    AdoptWeights,
    Progress,
    Published,
    Sample,
    SetPaused,
    ToTrainer,
    decode_line,
    encode_line,
)
from engine.types.feature_stats import TrainingState

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES: Final = 4 * 2**20
MAX_LINE_BYTES: Final = 2**16
MAX_STARTS: Final = 3
STOP_SECONDS: Final = 10.0
_PACKAGE_ROOT: Final = Path(__file__).parents[3]


class TrainerProcess:
    """Starts, supervises and stops the drafter's trainer process, and exchanges messages with it.

    Each `start` must be followed by a `stop`.
    """

    def __init__(self, drafter: Path, folder: Path) -> None:
        self._arguments = ("--drafter", str(drafter), "--folder", str(folder))
        self._process: Process | None = None
        self._supervisor_task: asyncio.Task[None] | None = None
        self._paused = False
        self._failed = False
        self._published: Published | None = None
        self.progress = Progress(num_steps=0, num_tokens=0, loss=0.0)
        self.num_dropped = 0
        """Number of samples that were dropped instead of sent to the trainer."""

    @property
    def state(self) -> TrainingState:
        if self._failed:
            return "failed"
        return "paused" if self._paused else "running"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        self._supervisor_task = asyncio.create_task(self._supervise(), name="drafter-trainer")

    async def stop(self) -> None:
        """Stop the trainer after its current step; it saves a checkpoint before it exits."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            with suppress(ProcessLookupError):
                process.kill()
        if self._supervisor_task is not None:
            self._supervisor_task.cancel()
            await asyncio.gather(self._supervisor_task, return_exceptions=True)

    def accepts_sample(self) -> bool:
        """Return whether the trainer's pipe has room for a sample; if not, count one as dropped."""
        process = self._process
        accepts = process is not None and process.stdin is not None and not _is_full(process.stdin)
        self.num_dropped += not accepts
        return accepts

    def send_sample(self, sample: Sample) -> None:
        if not self._send(sample):
            self.num_dropped += 1

    def pause(self, paused: bool) -> None:
        if paused != self._paused and self._send(SetPaused(paused=paused)):
            self._paused = paused

    def adopt(self, drafter: Path) -> None:
        self._send(AdoptWeights(path=str(drafter)))

    def take_published(self) -> Published | None:
        """The latest drafter published since the last call, or None."""
        published, self._published = self._published, None
        return published

    def _send(self, message: ToTrainer) -> bool:
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return False
        # Sent only once, so it must not be dropped.
        if _is_full(process.stdin) and not isinstance(message, AdoptWeights):
            return False
        process.stdin.write(encode_line(message))
        return True

    async def _supervise(self) -> None:
        for _ in range(MAX_STARTS):
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "engine.drafter.trainer", *self._arguments),
                stdin=PIPE,
                stdout=PIPE,
                env=_environment(),
                limit=MAX_LINE_BYTES,
                # Ctrl-C is for the service; this process ends when its input is closed.
                start_new_session=True,
            )
            self._paused = False
            await self._read_messages(process)
            log.warning("drafter trainer exited with status %s", await process.wait())
        self._failed = True

    async def _read_messages(self, process: Process) -> None:
        assert process.stdout is not None, "stdout is a pipe"
        async for line in process.stdout:
            message = decode_line(line)
            if isinstance(message, Published):
                self._discard(self._published)
                self._published = message
            elif isinstance(message, Progress):
                self.progress = message

    def _discard(self, published: Published | None) -> None:
        """Delete the file of a published drafter that `take_published` did not return."""
        if published is not None:
            Path(published.path).unlink(missing_ok=True)


def _is_full(pipe: asyncio.StreamWriter) -> bool:
    return pipe.transport.get_write_buffer_size() > MAX_QUEUED_BYTES


def _environment() -> dict[str, str]:
    paths = [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
