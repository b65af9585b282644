"""File cache of the step profile, so that only the first start with a model measures it.

As in `engine.attention.crossover_cache`, the file name is a digest of all inputs the times depend
on. An unreadable file is measured again; a failed write costs the next start a measurement.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engine.attention.crossover_cache import CacheKey, processor_name
from engine.speculation.cost import Step

logger = logging.getLogger(__name__)


class ProfileCache:
    """Step profile of one configuration, in a JSON file."""

    def __init__(self, directory: Path, cache_key: CacheKey) -> None:
        self._key = cache_key | {"processor_name": processor_name()}
        serialized = json.dumps(self._key, sort_keys=True).encode()
        self._file = directory / f"{hashlib.sha256(serialized).hexdigest()[:16]}.json"

    def read(self) -> list[Step] | None:
        try:
            steps = json.loads(self._file.read_text())["steps"]
            return [Step(**step) for step in steps]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, steps: Sequence[Step]) -> None:
        """Write atomically: replicas that start concurrently write the same file."""
        text = json.dumps({"of": self._key, "steps": [asdict(step) for step in steps]}, indent=2)
        part = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
            part.replace(self._file)
        except OSError as error:
            logger.warning("the profile of speculation is not kept: %s", error)
