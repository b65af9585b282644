"""A worker whose weights load takes longer than the time limit of a step."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from engine.launch.worker_extension import WorkerExtension
from engine.weights.checkpoint import Checkpoint

LOAD_SECONDS = 5.0


class SlowWorker(WorkerExtension):
    def coppice_open_tensors(
        self, checkpoint: Checkpoint, *, drafter: bool
    ) -> AbstractContextManager[Iterator[tuple[str, torch.Tensor]]]:
        time.sleep(LOAD_SECONDS)
        return super().coppice_open_tensors(checkpoint, drafter=drafter)
