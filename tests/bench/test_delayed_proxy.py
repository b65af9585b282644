"""Proxy with a round-trip time and a window, which stands for a network in benchmarks."""

import socket
import threading
import time

from bench.harness.delayed_proxy import CHUNK_BYTES, delayed_proxy

ROUND_TRIP_SECONDS = 0.05
CONTENT = bytes(range(256)) * (64 * CHUNK_BYTES // 256)


def receive(listening: socket.socket, received: bytearray) -> None:
    connection, _ = listening.accept()
    with connection:
        while data := connection.recv(2**16):
            received += data
        connection.sendall(b"done")


def send(window_bytes: int) -> tuple[bytes, bytes, float]:
    """The received bytes, the answer, and the seconds until it arrived."""
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        receiver = threading.Thread(target=receive, args=(listening, received))
        receiver.start()
        with (
            delayed_proxy(listening.getsockname()[1], ROUND_TRIP_SECONDS, window_bytes) as port,
            socket.create_connection(("127.0.0.1", port)) as connection,
        ):
            began = time.monotonic()
            connection.sendall(CONTENT)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(16)
            seconds = time.monotonic() - began
        receiver.join()
    return bytes(received), answer, seconds


def test_bytes_arrive_in_order_at_one_window_per_round_trip() -> None:
    received, answer, seconds = send(window_bytes=16 * CHUNK_BYTES)
    assert (received, answer) == (CONTENT, b"done")
    assert seconds >= 4 * ROUND_TRIP_SECONDS
