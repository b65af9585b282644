"""Command line of the training process: low priority, ends with its standard input."""

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import Final

PUBLISH_INTERVAL_SECONDS: Final = 10.0
"""Minimum time between two drafters published for an A/B test."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Trains a drafter on the responses that it receives on stdin."
    )
    parser.add_argument("--drafter", type=Path, required=True, help="the model to start from")
    parser.add_argument("--folder", type=Path, required=True, help="where it leaves what it makes")
    parser.add_argument("--published-seconds", type=float, default=PUBLISH_INTERVAL_SECONDS)
    args = parser.parse_args()
    lower_priority()
    train(args.drafter, args.folder, args.published_seconds)


def lower_priority() -> None:
    """Lower the priority of this process to SCHED_IDLE, so that it runs only on idle processors.

    Where SCHED_IDLE is unavailable, the nice value applies.
    """
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def train(drafter: Path, folder: Path, published_seconds: float) -> None:
    import torch

    from engine.drafter.trainer.messages import FromTrainer, checkpoint_file, encode_line
    from engine.drafter.trainer.model_trainer import ModelTrainer
    from engine.drafter.trainer.replay_buffer import Inbox
    from engine.drafter.trainer.training_loop import TrainingLoop

    def send(message: FromTrainer) -> None:
        sys.stdout.buffer.write(encode_line(message))
        sys.stdout.buffer.flush()

    torch.set_num_threads(1)
    inbox = Inbox()
    threading.Thread(target=inbox.receive, args=(sys.stdin.buffer,), daemon=True).start()
    model_trainer = ModelTrainer(drafter)
    model_trainer.resume(checkpoint_file(folder))
    TrainingLoop(model_trainer, inbox, folder, send, published_seconds=published_seconds).run()


if __name__ == "__main__":
    main()
