"""Methods added to vLLM's CPU workers: start of drafting, and use of the measured step times.

The draft proposer is attached on rank 0, whose drafts are used by all ranks. All ranks sample
identically, with the same hooks in their model runners.
"""

from typing import Any

from engine.runtime.feature_guard import Failure, attempt


def coppice_start_speculation(self: Any) -> bool:
    """Attach the draft proposer; returns whether a profile of step times must be measured."""
    return attempt(_attach_proposer, self) is True


def coppice_finish_profile(self: Any) -> bool:
    return not isinstance(attempt(_apply_profile, self), Failure)


METHODS = (coppice_start_speculation, coppice_finish_profile)


def on_weights_changed(worker: Any) -> None:
    """Notify the proposer that earlier text was sampled under other weights."""
    drafter = getattr(worker.model_runner, "drafter", None)
    if drafter is not None and hasattr(drafter, "on_weights_changed"):
        drafter.on_weights_changed()


def _attach_proposer(worker: Any) -> bool:
    proposer = worker.model_runner.drafter
    proposer.install(worker.model_runner)
    if worker.rank != 0:
        return False
    proposer.attach(worker.model_runner)
    return bool(proposer.begin_profile())


def _apply_profile(worker: Any) -> None:
    if worker.rank == 0:
        worker.model_runner.drafter.end_profile()
