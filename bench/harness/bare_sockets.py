"""Bytes of a file sent over bare loopback sockets between processes, without HTTP or checksums.

It is the baseline of prompt KV over HTTP: the same bytes in the same pieces.
"""

import argparse
import mmap
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen

from coppice import KvHandle
from service.kv.handles.downloads import PIECE_BYTES

COMMAND = [sys.executable, "-m", "bench.harness.bare_sockets"]


@contextmanager
def bare_sender(handle: KvHandle) -> Iterator[int]:
    """Process that sends the bytes of a handle to each connection; yields its port."""
    shm = handle.locators[0]
    what = [str(shm.path), str(shm.offset), str(handle.num_bytes)]
    with Popen([*COMMAND, "send", *what], stdout=PIPE, text=True) as process:
        assert process.stdout
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def bare_readers(port: int, num_bytes: int, count: int, bytes_per_second: float) -> Iterator[None]:
    """Processes that each read the bytes in a loop; the context begins once each has them.

    `bytes_per_second`: the mean rate of each of them.
    """
    command = [*COMMAND, "read", str(port), str(num_bytes), str(bytes_per_second)]
    processes = [Popen(command, stdout=PIPE, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "read\n", "the reader has ended"
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def read_once(port: int, buffer: memoryview) -> None:
    at = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while at < len(buffer):
            num_bytes = connection.recv_into(buffer[at:])
            assert num_bytes, "the sender has ended"
            at += num_bytes


def _send(path: Path, offset: int, num_bytes: int) -> None:
    with path.open("rb") as file:
        arena = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    data = arena[offset : offset + num_bytes]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_send_to, args=(connection, data)).start()


def _send_to(connection: socket.socket, data: memoryview) -> None:
    with connection, suppress(ConnectionError):
        for start in range(0, len(data), PIECE_BYTES):
            connection.sendall(data[start : start + PIECE_BYTES])


def _read_for_ever(port: int, num_bytes: int, bytes_per_second: float) -> None:
    buffer = memoryview(bytearray(num_bytes))
    read_once(port, buffer)
    print("read", flush=True)
    while True:
        read_once(port, buffer)
        time.sleep(num_bytes / bytes_per_second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("send", "read"))
    parser.add_argument("arguments", nargs="+")
    given = parser.parse_args()
    if given.part == "read":
        port, num_bytes, rate = given.arguments
        return _read_for_ever(int(port), int(num_bytes), float(rate))
    path, offset, num_bytes = given.arguments
    return _send(Path(path), int(offset), int(num_bytes))


if __name__ == "__main__":
    main()
