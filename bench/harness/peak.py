"""The machine's own ceiling, measured: floating-point operations a second of all cores together."""

import ctypes
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEPS, TIMES = 2_000_000, 20


def flops_per_second(flags: list[str], *, num_threads: int) -> float:
    """Compiles the loop for the instruction set that the flags name, and runs it on every core."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        source = Path(__file__).with_name("peak.cpp")
        command = ["c++", "-O2", "-shared", "-fPIC", *flags, str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        measure = ctypes.CDLL(str(library)).flops_per_second
        measure.restype = ctypes.c_double

        def best(_: int) -> float:
            """What disturbs a run only ever makes it slower."""
            return float(max(measure(STEPS) for _ in range(TIMES)))

        with ThreadPoolExecutor(num_threads) as threads:  # ctypes lets go of the GIL
            return sum(threads.map(best, range(num_threads)))
