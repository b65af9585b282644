"""Versions that know which of the trainer's steps they are from."""

import itertools
import re
import uuid

_LABEL = re.compile(r"verl-[0-9a-f]{8}-\d+\.(\d+)")


class VersionLabels:
    """No two runs on a server use the same label, nor does one run that goes back a step."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex[:8]
        self._numbers = itertools.count(1)

    def next(self, global_steps: int | None) -> str:
        label = f"verl-{self._run}-{next(self._numbers)}"
        return label if global_steps is None else f"{label}.{global_steps}"


def global_steps(label: str) -> int | None:
    """None of a version that was published without, or by somebody else."""
    found = _LABEL.fullmatch(label)
    return None if found is None else int(found[1])
