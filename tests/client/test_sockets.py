import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coppice import ConnectionFailed, StreamBroken, TimedOut, WeightsRefused
from tests.client.answers import LINES, VERSION
from tests.client.conftest import Connect
from tests.client.server import read_head, read_request, send_chunks, serving


def test_refused_connection_is_a_connection_error(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionFailed):
        connect(base_url=f"http://127.0.0.1:{port}").status()


def test_closed_connection_is_a_connection_error(connect: Connect) -> None:
    with serving(lambda connection: None) as address, pytest.raises(ConnectionFailed):
        connect(base_url=address).status()


def test_silent_server_times_out(connect: Connect) -> None:
    done = threading.Event()

    def script(connection: socket.socket) -> None:
        done.wait(30)

    with serving(script) as address:
        with pytest.raises(TimedOut):
            connect(base_url=address, timeout=0.1).status()
        done.set()


def test_server_death_breaks_a_stream(connect: Connect) -> None:
    def script(connection: socket.socket) -> None:
        read_request(connection)
        send_chunks(connection, LINES[:3])

    with serving(script) as address:
        records = connect(base_url=address).stream(["hello"])
        came = [next(records) for _ in range(3)]
        assert [record.type for record in came] == ["start", "sample", "group"]
        with pytest.raises(StreamBroken):
            next(records)


def test_server_sees_a_stream_closed_early(connect: Connect) -> None:
    closed: list[bytes] = []

    def script(connection: socket.socket) -> None:
        read_request(connection)
        send_chunks(connection, LINES[:1])
        connection.settimeout(30)
        closed.append(connection.recv(1))

    with serving(script) as address:
        records = connect(base_url=address).stream(["hello"])
        next(records)
        records.close()
    assert closed == [b""]


def checkpoint(path: Path, num_bytes: int) -> bytes:
    array = np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8)
    save_file({"w": array}, path)
    return path.read_bytes()


def remote(address: str) -> str:
    """URL of the same server that is not a loopback address, so that weights are uploaded."""
    return address.replace("127.0.0.1", "0.0.0.0")


def test_large_file_arrives_unchanged(connect: Connect, tmp_path: Path) -> None:
    expected = checkpoint(tmp_path / "model.safetensors", 24 * 2**20)
    received: list[bytes] = []

    def script(connection: socket.socket) -> None:
        received.append(read_request(connection))
        body = VERSION.model_dump_json()
        answer = f"HTTP/1.1 201 Created\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        connection.sendall(answer.encode())

    with serving(script) as address:
        assert connect(base_url=remote(address)).upload_weights("v7", tmp_path) == VERSION
    assert received == [expected]


def test_refusal_is_read_before_the_upload_ends(connect: Connect, tmp_path: Path) -> None:
    checkpoint(tmp_path / "model.safetensors", 24 * 2**20)
    body = '{"type": "x", "title": "No", "status": 507, "code": "weights_refused"}'

    def script(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(
            "HTTP/1.1 507 No\r\nContent-Type: application/problem+json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**20):
            pass

    with serving(script) as address, pytest.raises(WeightsRefused):
        connect(base_url=remote(address), timeout=30).upload_weights("v7", tmp_path)
