"""One-sided NIXL reads of prompt KV: from another process, refused, interrupted, corrupted."""

import threading
from pathlib import Path

import pytest

from coppice import KvHandle, KvSource, PromptKV
from coppice.prompt_kv import server_kv_source as source_module
from tests.client.test_kv import assert_right, fetched, handle_from, server
from tests.nixl_agent import agent_process, eventually, needs_nixl, suspend

WAYS = ["nixl", "http"]


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The UCX transport that needs the owner's process for every read, and no RDMA network."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


def handle_with_nixl(url: str) -> KvHandle:
    """A handle, once the server has its agent."""
    found: list[KvHandle] = []

    def offered() -> bool:
        found.append(handle_from(url))
        return any(locator.transport == "nixl" for locator in found[-1].locators)

    eventually(offered)
    return found[-1]


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("transports", ["tcp", "all"])
def test_bytes_equal_those_of_the_other_transports(
    tmp_path: Path, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    with server(tmp_path, nixl=True) as url:
        handle, source = handle_with_nixl(url), KvSource(url, transports=WAYS)
        for _ in range(2):
            kv = fetched(handle, source)
            assert kv.transport == "nixl"
            assert_right(kv)
        assert source.counts == {"nixl": 2}
        assert KvSource(url).transports == ("shm", "nixl", "http")
        source.release(handle.handle)
        assert PromptKV.fetch(handle, source) is None
        assert source.counts == {"nixl": 2, "kv_gone": 1}
        owner = agent_process()
    assert not owner.is_running(), "it ends with its server"


@needs_nixl
@pytest.mark.slow
def test_owner_killed_during_a_read_falls_back(tmp_path: Path) -> None:
    """The end of the owner is noticed. The timeout of the read is longer than any test run."""
    with server(tmp_path, nixl=True) as url:
        handle, source = handle_with_nixl(url), KvSource(url, transports=WAYS, timeout=3600)
        assert fetched(handle, source).transport == "nixl"
        owner = agent_process()
        suspend(owner)  # so that the read is certainly in progress
        killer = threading.Timer(0.5, owner.kill)
        killer.start()
        kv = fetched(handle, source)
        killer.join()
        assert kv.transport == "http"
        assert_right(kv)
        assert source.counts == {"nixl": 1, "nixl_failed": 1, "http": 1}
        eventually(lambda: len(handle_from(url).locators) == 2)
        assert fetched(handle, source).transport == "http"
        assert source.counts["nixl_failed"] == 1, "who failed is not asked again"


@needs_nixl
@pytest.mark.slow
def test_unresponsive_owner_is_given_up(tmp_path: Path) -> None:
    with server(tmp_path, nixl=True) as url:
        handle = handle_with_nixl(url)
        source = KvSource(url, transports=WAYS, timeout=3)
        suspend(agent_process())
        for _ in range(2):
            kv = fetched(handle, source)
            assert kv.transport == "http"
            assert_right(kv)
        assert source.counts == {"nixl_failed": 1, "http": 2}


@needs_nixl
@pytest.mark.slow
def test_bytes_that_fail_the_checksum_are_refused(tmp_path: Path) -> None:
    with server(tmp_path, nixl=True) as url:
        handle, source = handle_with_nixl(url), KvSource(url, transports=WAYS)
        shm, nixl, http = handle.locators
        assert shm.path is not None and shm.offset is not None
        elsewhere = nixl.model_copy(update={"offset": shm.offset + 4096})
        kv = fetched(handle.model_copy(update={"locators": [elsewhere, http]}), source)
        assert kv.transport == "http"
        assert_right(kv)
        with open(shm.path, "r+b") as arena:
            arena.seek(shm.offset + handle.num_bytes - 5)
            arena.write(b"?")
        assert PromptKV.fetch(handle, source) is None
        assert source.counts == {"nixl_failed": 2, "http": 2, "KvLost": 1}


def test_without_nixl_the_transport_is_skipped_unless_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "installed", lambda: False)
    assert KvSource("http://x").transports == ("shm", "http")
    with pytest.raises(ValueError, match=r"pip install 'coppice-client\[nixl\]'"):
        KvSource("http://x", transports=WAYS)
