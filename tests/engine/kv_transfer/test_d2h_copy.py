"""The thread that completes device-to-host copies, with events controlled by the test."""

import threading

import torch

from engine.kv_transfer.worker.cache_blocks import CopyThread
from engine.runtime.feature_guard import Failure


class Transfer:
    """A torch event: `synchronize` returns when the transfer is complete."""

    def __init__(self, error: str | None = None) -> None:
        self.over = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        assert self.over.wait(30)
        if self._error:
            raise RuntimeError(self._error)


def test_bytes_are_stored_in_order_and_flush_waits() -> None:
    copy_thread, failures = CopyThread(), list[Failure | None]()
    transfers, outs = [Transfer(), Transfer()], [torch.zeros(3), torch.zeros(3)]
    for i, (transfer, out) in enumerate(zip(transfers, outs, strict=True)):
        copy_thread.submit(torch.full((3,), i + 1.0), transfer, out, failures.append)
    waiting = threading.Thread(target=copy_thread.flush)
    waiting.start()
    transfers[1].over.set()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert failures == [] and not outs[1].any()
    transfers[0].over.set()
    waiting.join(30)
    assert failures == [None, None]
    assert [out.tolist() for out in outs] == [[1.0] * 3, [2.0] * 3]


def test_failed_transfer_is_reported_and_the_next_one_completes() -> None:
    copy_thread, failures = CopyThread(), list[Failure | None]()
    broken, whole, out = Transfer("lost"), Transfer(), torch.zeros(3)
    for transfer in (broken, whole):
        transfer.over.set()
        copy_thread.submit(torch.ones(3), transfer, out, failures.append)
    copy_thread.flush()
    assert failures == [Failure("RuntimeError: lost"), None]
    assert out.tolist() == [1.0] * 3


def test_flush_without_transfers_returns_at_once() -> None:
    CopyThread().flush()
