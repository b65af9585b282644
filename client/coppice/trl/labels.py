"""What the versions of one training run are called."""

import itertools
import uuid


class VersionLabels:
    """Two runs on one server never publish under the same label."""

    def __init__(self) -> None:
        self.run = f"trl-{uuid.uuid4().hex[:8]}"
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self.run}-{next(self._numbers)}"
