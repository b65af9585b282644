"""Prompt KV in the client, over HTTP and shared memory: complete, resumed, refused, profitable."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coppice import Kv, KvHandle, KvLost, KvSource, KvUnavailable, PromptKV, Rollouts
from coppice.errors import BadAnswer
from coppice.prompt_kv.file_layout import layout_of
from coppice.prompt_kv.http_client import Download
from coppice.wire.prompt_kv import KvLocator
from tests.fake_engine import FakeEngine
from tests.fake_export import fake_kv
from tests.serving_thread import serving_in_thread

pytestmark = pytest.mark.slow

PROMPT = [*range(256)] * 16
NUM_BYTES = 4 * 10**6


@contextmanager
def server(tmp_path: Path, **kv: Any) -> Iterator[str]:
    engine = FakeEngine(prompt_kv=True, max_context_tokens=10_000)
    with serving_in_thread(engine, tmp_path, kv={"capacity_bytes": 2**23, **kv}) as url:
        yield url


def handle_from(url: str, prompt: list[int] = PROMPT, **kv: Any) -> KvHandle:
    with Rollouts(url) as rollouts:
        (group,) = rollouts.rollout([prompt], max_tokens=2, kv=Kv(**kv)).groups
    assert group.kv is not None, group.kv_reason
    return group.kv


def assert_right(kv: PromptKV, prompt: list[int] = PROMPT) -> None:
    expected = fake_kv(prompt[:-1], "v0")
    for layer in range(2):
        keys, values = kv.numpy(layer)
        assert (keys == expected[layer, 0]).all()
        assert (values == expected[layer, 1]).all()


def fetched(handle: KvHandle, source: KvSource, **options: Any) -> PromptKV:
    kv = PromptKV.fetch(handle, source, **options)
    assert kv is not None, source.counts
    return kv


@pytest.mark.parametrize("transport", ["http", "shm"])
def test_both_transports_return_the_same_bytes(tmp_path: Path, transport: str) -> None:
    with server(tmp_path) as url:
        handle, source = handle_from(url), KvSource(url, transports=[transport])
        with fetched(handle, source) as kv:
            assert_right(kv)
            assert (kv.transport, kv.layout.version, kv.layout.num_tokens) == (
                transport,
                "v0",
                len(PROMPT) - 1,
            )
            del kv
        assert source.counts == {transport: 1}
        with pytest.raises(KvUnavailable):
            source.layout(handle.handle)


def test_shared_memory_is_preferred_with_http_as_fallback(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle, source = handle_from(url), KvSource(url)
        assert fetched(handle, source).transport == "shm"
        elsewhere = KvLocator(transport="shm", path="/dev/shm/coppice-kv-elsewhere", offset=0)
        foreign = KvLocator(transport="shm", path="/etc/passwd", offset=0)
        for locator in (elsewhere, foreign):
            locators = [locator, KvLocator(transport="carrier-pigeon"), handle.locators[1]]
            kv = fetched(handle.model_copy(update={"locators": locators}), source)
            assert kv.transport == "http"
            assert_right(kv)


def test_mapped_memory_is_read_only(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        keys, _ = fetched(handle_from(url), KvSource(url, transports=["shm"])).numpy(0)
        with pytest.raises(ValueError, match="read-only"):
            keys[0] = 0


def test_buffer_is_filled_in_place(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle, source = handle_from(url), KvSource(url, transports=["http"])
        buffer = np.zeros(handle.num_bytes + 100, np.uint8)
        kv = fetched(handle, source, buffer=buffer)
        assert np.shares_memory(kv.numpy(1)[0], buffer)
        assert_right(kv)
        with pytest.raises(ValueError, match="must be writable and have"):
            PromptKV.fetch(handle, source, buffer=bytearray(100))


def test_layer_is_available_before_the_download_ends(tmp_path: Path) -> None:
    with server(tmp_path) as url, proxy(url, bytes_per_second=1.5e6) as slow:
        handle, source = handle_from(url), KvSource(slow, transports=["http"])
        kv = fetched(handle, source, wait=False)
        kv.layer(0)
        assert kv._download_buffer.num_received < handle.num_bytes
        assert_right(kv)


def test_any_failure_of_a_download_is_raised_to_waiters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(download: Download, room: memoryview) -> None:
        raise ValueError("odd")

    with server(tmp_path) as url:
        handle, source = handle_from(url), KvSource(url, transports=["http"])
        begins = iter([Download.readinto] * 2)  # its length, then its head
        monkeypatch.setattr(Download, "readinto", lambda *given: next(begins, odd)(*given))
        kv = fetched(handle, source, wait=False)
        with pytest.raises(KvLost, match="odd"):
            kv.wait()


@contextmanager
def proxy(url: str, *cuts: int, bytes_per_second: float = math.inf) -> Iterator[str]:
    """A proxy whose first connections end after these numbers of bytes of an answer."""
    host, port = url.removeprefix("http://").split(":")
    left = list(cuts)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as connections:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                upstream = socket.create_connection((host, int(port)))
                num_bytes = left.pop(0) if left else 2**60
                arguments = (client, upstream, num_bytes, bytes_per_second)
                thread = threading.Thread(target=proxy_connection, args=arguments)
                thread.start()
                connections.callback(thread.join, timeout=10)

        accepting = threading.Thread(target=serve)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(timeout=10)
            assert not accepting.is_alive()


def proxy_connection(
    client: socket.socket, upstream: socket.socket, num_bytes: int, bytes_per_second: float
) -> None:
    """Forwards in both directions until one side ends, or after `num_bytes` of the answer."""
    with client, upstream:
        sending = threading.Thread(target=forward, args=(client, upstream, 2**60, math.inf))
        sending.start()
        forward(upstream, client, num_bytes, bytes_per_second)
        sending.join()


def forward(
    source: socket.socket, target: socket.socket, num_bytes: int, bytes_per_second: float
) -> None:
    """Copies at most `num_bytes`, and then ends both connections."""
    with suppress(OSError):
        while num_bytes and (data := source.recv(min(65536, num_bytes))):
            target.sendall(data)
            num_bytes -= len(data)
            time.sleep(len(data) / bytes_per_second)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_broken_download_is_resumed(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle = handle_from(url)
        with proxy(url, 150, 1_000_000, 300_000, 2_000_000) as broken:
            source = KvSource(broken, transports=["http"])
            assert_right(fetched(handle, source))


def test_download_longer_than_its_lease_renews_it(tmp_path: Path) -> None:
    with server(tmp_path) as url, proxy(url, bytes_per_second=2e6) as slow:
        handle, source = handle_from(url, lease_seconds=1.0), KvSource(slow, transports=["http"])
        assert_right(fetched(handle, source))


def test_temporarily_refused_download_is_retried(tmp_path: Path) -> None:
    with server(tmp_path, max_open_transfers=1) as url, proxy(url, bytes_per_second=8e6) as slow:
        handle = handle_from(url)
        first = fetched(handle, KvSource(slow, transports=["http"]), wait=False)
        assert_right(fetched(handle, KvSource(url, transports=["http"])))
        assert_right(first)


def test_connection_that_never_sends_a_byte_is_given_up(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle = handle_from(url)
        with proxy(url, *[1] * 9) as broken:
            source = KvSource(broken, transports=["http"])
            assert PromptKV.fetch(handle, source) is None
            assert source.counts == {"ConnectionFailed": 1}


def test_every_refusal_means_recompute_and_is_counted(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        source = KvSource(url)
        assert PromptKV.fetch(None, source) is None
        handle = handle_from(url)
        source.release(handle.handle)
        for transports in (["http"], ["shm"]):
            source.transports = tuple(transports)
            assert PromptKV.fetch(handle, source) is None
        unknown = handle.model_copy(
            update={"handle": "x", "locators": [KvLocator(transport="http")]}
        )
        source.transports = ("http",)
        assert PromptKV.fetch(unknown, source) is None
        assert PromptKV.fetch(handle.model_copy(update={"locators": []}), source) is None
    assert PromptKV.fetch(handle, source) is None
    assert source.counts == {
        "kv_gone": 2,
        "kv_not_found": 1,
        "no_transport": 1,
        "ConnectionFailed": 1,
    }


def test_version_other_than_asserted_is_a_conflict(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle, source = handle_from(url), KvSource(url)
        assert source.layout(handle.handle, version="v0").version == "v0"
        with pytest.raises(KvUnavailable, match="kv_version_conflict"):
            source.layout(handle.handle, version="v1")
        assert 25 < source.renew(handle.handle, 30) <= 60


def test_bytes_changed_during_a_read_are_detected(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle = handle_from(url)
        kv = fetched(handle, KvSource(url, transports=["shm"]), wait=False)
        kv.layer(0)
        shm = handle.locators[0]
        assert shm.path is not None and shm.offset is not None
        with open(shm.path, "r+b") as arena:
            arena.seek(shm.offset + handle.num_bytes - 5)
            arena.write(b"?")
        with pytest.raises(KvLost, match="v.1"):
            kv.layer(1)
        source = KvSource(url, transports=["http"])
        assert PromptKV.fetch(handle, source) is None
        assert source.counts["KvLost"] == 1


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"__metadata__": {}}',
        b'{"__metadata__": {}, "k.0": {"dtype": "F64", "shape": [1, 2, 3]}, "v.0": {}}',
        b'{"__metadata__": {"xxh3_64": "{}"}, "k.0": {"dtype": "F32", "shape": [1, 2, 3],'
        b' "data_offsets": [8, 32]}, "v.0": {}}',
    ],
)
def test_invalid_header_is_refused(header: bytes) -> None:
    handle = KvHandle(
        handle="h", version="v0", num_tokens=2, num_bytes=100, lease_seconds=1, locators=[]
    )
    with pytest.raises(BadAnswer):
        layout_of(len(header).to_bytes(8, "little") + header, handle)


def test_fetching_is_preferred_where_it_was_faster_than_prefill(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle, source = handle_from(url), KvSource(url, transports=["http"])
        assert source.worth_fetching(handle), "nothing is known yet"
        source.computed(1000, 1e-6)
        fetched(handle, source)
        assert not source.worth_fetching(handle), "a billion tokens a second"
        for _ in range(40):
            source.computed(1, 1.0)
        assert source.worth_fetching(handle)
        assert not KvSource(url, transports=["shm"]).worth_fetching(
            handle.model_copy(update={"locators": handle.locators[1:]})
        )


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="carrier-pigeon"):
        KvSource("http://x", transports=["carrier-pigeon"])
