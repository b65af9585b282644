"""Trains until its input ends: the least important process of its machine."""

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import Final

PUBLISHED_SECONDS: Final = 10.0
"""From one drafter that is offered for a trial to the next, at least."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a drafter on what it is told.")
    parser.add_argument("--drafter", type=Path, required=True, help="the model to start from")
    parser.add_argument("--folder", type=Path, required=True, help="where it leaves what it makes")
    parser.add_argument("--trained", choices=("all", "layers"), required=True)
    parser.add_argument("--published-seconds", type=float, default=PUBLISHED_SECONDS)
    args = parser.parse_args()
    humble()
    train(args.drafter, args.folder, args.trained, args.published_seconds)


def humble() -> None:
    """SCHED_IDLE runs where nobody else wants to; where there is none, the priority counts."""
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def train(drafter: Path, folder: Path, trained: str, published_seconds: float) -> None:
    import torch

    from engine.drafter.trainer.inbox import Ears
    from engine.drafter.trainer.messages import Tells, checkpoint_file, line_of
    from engine.drafter.trainer.model_trainer import Learner
    from engine.drafter.trainer.training_loop import Trainer

    def tell(message: Tells) -> None:
        sys.stdout.buffer.write(line_of(message))
        sys.stdout.buffer.flush()

    torch.set_num_threads(1)
    ears = Ears()
    threading.Thread(target=ears.listen, args=(sys.stdin.buffer,), daemon=True).start()
    learner = Learner(drafter, trained="all" if trained == "all" else "layers")
    learner.resume(checkpoint_file(folder))
    Trainer(learner, ears, folder, tell, published_seconds=published_seconds).run()


if __name__ == "__main__":
    main()
