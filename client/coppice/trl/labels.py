"""Version labels of a training run."""

import itertools
import uuid


class VersionLabels:
    """Generator of labels that are unique across runs on one server."""

    def __init__(self) -> None:
        self.run = f"trl-{uuid.uuid4().hex[:8]}"
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self.run}-{next(self._numbers)}"
