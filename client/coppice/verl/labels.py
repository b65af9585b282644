"""Version labels that contain the trainer's step."""

import itertools
import re
import uuid

_LABEL = re.compile(r"verl-[0-9a-f]{8}-\d+\.(\d+)")


class VersionLabels:
    """Generator of labels, unique across runs, and within a run that repeats a step."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex[:8]
        self._numbers = itertools.count(1)

    def next(self, global_steps: int | None) -> str:
        label = f"verl-{self._run}-{next(self._numbers)}"
        return label if global_steps is None else f"{label}.{global_steps}"


def global_steps(label: str) -> int | None:
    """Trainer step in a label; None if it has none or was not published by this module."""
    found = _LABEL.fullmatch(label)
    return None if found is None else int(found[1])
