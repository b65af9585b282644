"""A worker extension that injects failures into weight loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch

from engine.launch.worker_extension import WorkerExtension
from engine.weights import worker_reload
from engine.weights.checkpoint import Checkpoint


class FaultyExtension(WorkerExtension):
    """`coppice_fail_next` makes loads of one rank fail after that many tensors."""

    coppice_num_tensors = 0
    coppice_num_loads = 0

    def coppice_fail_next(self, num_tensors: int, num_loads: int = 1, rank: int = 0) -> None:
        self.coppice_num_tensors = num_tensors
        self.coppice_num_loads = num_loads if rank == self.rank else 0

    def coppice_reset(self) -> None:
        worker_reload.reset(self)

    @contextmanager
    def coppice_open_tensors(
        self, checkpoint: Checkpoint, *, drafter: bool
    ) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        with super().coppice_open_tensors(checkpoint, drafter=drafter) as tensors:
            yield self.coppice_failing(tensors)

    def coppice_failing(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if self.coppice_num_loads == 0:
            yield from tensors
        else:
            self.coppice_num_loads -= 1
            yield from islice(tensors, self.coppice_num_tensors)
            raise OSError("the disk is gone")
