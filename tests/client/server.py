"""A server on a real socket, for tests of socket behaviour."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Script = Callable[[socket.socket], None]


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Runs the script on one connection, which is then closed; yields the server's address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                script(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(timeout=30)
        assert not thread.is_alive()


def read_request(connection: socket.socket) -> bytes:
    """The body, which must have a Content-Length."""
    head, body = read_head(connection)
    length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
    while len(body) < length:
        body += connection.recv(2**20)
    return body


def read_head(connection: socket.socket) -> tuple[str, bytes]:
    """The head of a request, and the part of its body received with it."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, rest = received.partition(b"\r\n\r\n")
    return head.decode(), rest


def send_chunks(connection: socket.socket, chunks: list[bytes]) -> None:
    """Sends the start of a chunked stream; an empty chunk ends it."""
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n"
    connection.sendall(head.encode() + b"\r\n")
    for chunk in chunks:
        connection.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
