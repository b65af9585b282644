"""HTTP server of weights files, for the machines of one engine, while they copy them.

It serves only the files of one copy, by their index, to callers that have sent its random token.
A response ends with the XXH3 hash of the file, since TCP's checksums miss errors in large files.
"""

import hmac
import secrets
import socket
import socketserver
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import xxhash

CHUNK_BYTES: Final = 2**22
HASH_BYTES: Final = 8
TOKEN_BYTES: Final = 32
MAX_CONNECTIONS: Final = 256
SEND_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.05


class FileServer(ThreadingHTTPServer):
    """Server of `files` at `url` followed by a file's index; runs in threads until `close`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, files: Sequence[Path]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Handler)
        self.files = files
        self._token = secrets.token_urlsafe(TOKEN_BYTES)
        self._connections = threading.Semaphore(MAX_CONNECTIONS)
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.server_address[1]}/{self._token}/"
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_SECONDS,), name="weights-files", daemon=True
        )
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name in `HTTPServer`, which can take seconds."""
        socketserver.TCPServer.server_bind(self)

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def file_at(self, path: str) -> Path | None:
        """File of a request's path, or None if the token or the index is wrong."""
        token, _, index = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        known = index.isascii() and index.isdecimal() and len(index) < 10
        return self.files[int(index)] if known and int(index) < len(self.files) else None

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the copying machine reports the failure."""


class _Handler(BaseHTTPRequestHandler):
    server: FileServer
    timeout = SEND_SECONDS

    def do_GET(self) -> None:
        file = self.server.file_at(self.path)
        if file is None:
            self.send_error(404)
            return
        with file.open("rb") as stream:
            num_bytes = stream.seek(0, 2)
            stream.seek(0)
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(num_bytes + HASH_BYTES))
            self.end_headers()
            digest = xxhash.xxh3_64()
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                self.wfile.write(chunk)
            self.wfile.write(digest.digest())

    def log_message(self, format: str, *args: object) -> None:
        """No log: the path holds the token."""
