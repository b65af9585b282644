"""Generator of unique names of weights versions from trainer steps, and parser of the step."""

import itertools
import re
import uuid

_LABEL_WITH_STEP = re.compile(r"[a-z]+-[0-9a-f]{8}-\d+\.(\d+)")


class LabelGenerator:
    """Generates labels of weights versions, unique across runs and even if a run repeats a step."""

    def __init__(self, trainer: str) -> None:
        self.run = f"{trainer}-{uuid.uuid4().hex[:8]}"
        self._numbers = itertools.count(1)

    def next(self, step: int | None = None) -> str:
        label = f"{self.run}-{next(self._numbers)}"
        return label if step is None else f"{label}.{step}"


def step_of(label: str) -> int | None:
    """Trainer step in a version label, or None if the label has no step or another format."""
    found = _LABEL_WITH_STEP.fullmatch(label)
    return None if found is None else int(found[1])
