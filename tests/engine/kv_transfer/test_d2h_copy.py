"""The thread that ends a GPU's copies, with events that the test lets happen."""

import threading

import torch

from engine.kv_transfer.worker.d2h_copy import CopyThread
from engine.runtime.guard import Failure


class Transfer:
    """As torch's event: `synchronize` returns when the transfer is over."""

    def __init__(self, error: str | None = None) -> None:
        self.over = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        assert self.over.wait(30)
        if self._error:
            raise RuntimeError(self._error)


def test_bytes_land_in_order_after_their_transfer_and_settle_waits() -> None:
    copy_thread, said = CopyThread(), list[Failure | None]()
    transfers, outs = [Transfer(), Transfer()], [torch.zeros(3), torch.zeros(3)]
    for i, (transfer, out) in enumerate(zip(transfers, outs, strict=True)):
        copy_thread.submit(torch.full((3,), i + 1.0), transfer, out, said.append)
    waiting = threading.Thread(target=copy_thread.flush)
    waiting.start()
    transfers[1].over.set()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert said == [] and not outs[1].any()
    transfers[0].over.set()
    waiting.join(30)
    assert said == [None, None]
    assert [out.tolist() for out in outs] == [[1.0] * 3, [2.0] * 3]


def test_a_transfer_that_fails_is_said_and_the_next_one_lands() -> None:
    copy_thread, said = CopyThread(), list[Failure | None]()
    broken, whole, out = Transfer("lost"), Transfer(), torch.zeros(3)
    for transfer in (broken, whole):
        transfer.over.set()
        copy_thread.submit(torch.ones(3), transfer, out, said.append)
    copy_thread.flush()
    assert said == [Failure("RuntimeError: lost"), None]
    assert out.tolist() == [1.0] * 3


def test_nothing_under_way_settles_at_once() -> None:
    CopyThread().flush()
