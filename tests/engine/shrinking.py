"""A file that its owner truncates and rewrites continually, and a reader in another process.

    python -m tests.engine.shrinking READER FILE SECONDS

reads FILE repeatedly, at least for this time and until it was refused, and prints how often it was
refused. A reader that maps the file dies of SIGBUS.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coppice.weights.checkpoint_files import checkpoint_files
from engine.errors import CheckpointRefused
from engine.weights.checkpoint import read_checkpoint
from tests.sample_sizes import TIMES

ROOT = Path(__file__).parents[2]
NUM_TENSORS = 50_000
CUT_BYTES = 4096
SECONDS = 2.0 if TIMES < 0.3 else 4.0
MAX_SECONDS = 120.0
READERS: dict[str, Callable[[Path], object]] = {
    "engine": read_checkpoint,
    "client": checkpoint_files,
}


def content() -> bytes:
    """A header of some megabytes, which takes a while to parse, and one byte per tensor."""
    entries = {
        f"model.layers.{index}.mlp.up_proj.weight": {
            "dtype": "U8",
            "shape": [1],
            "data_offsets": [index, index + 1],
        }
        for index in range(NUM_TENSORS)
    }
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(NUM_TENSORS)


def read_while_it_shrinks(reader: str, file: Path) -> tuple[int, int]:
    """The exit status of the reader, and how often it refused the file."""
    whole = content()
    file.write_bytes(whole)
    command = [sys.executable, "-m", "tests.engine.shrinking", reader, str(file), str(SECONDS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        while process.poll() is None:
            os.truncate(file, CUT_BYTES)
            time.sleep(0.005)
            file.write_bytes(whole)
            time.sleep(0.02)
        refused = int(process.stdout.read() or 0)
    return process.returncode, refused


def main(reader: str, file: Path, seconds: float) -> None:
    print("reading", flush=True)
    refused = 0
    began_at = time.monotonic()
    while (passed := time.monotonic() - began_at) < seconds or (
        not refused and passed < MAX_SECONDS
    ):
        try:
            READERS[reader](file)
        except (CheckpointRefused, ValueError):
            refused += 1
    print(refused)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
