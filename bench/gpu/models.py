"""Models of random weights for a run, and the versions of the largest one.

    python -m bench.gpu.models DIRECTORY [--rehearse]

The served model and its drafter repeat tokens, so that drafts are accepted: otherwise the engine
would stop drafting, and nothing could be measured. The versions are hard links of the first one's
files: a publication reads other files than those that are served, and the values do not matter.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.random_model import write_model

NUM_VERSIONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Shapes of the served model, its drafter, and the model that is published."""

    model: str
    drafter: str
    published: str

    def versions(self) -> list[str]:
        return [f"{self.published}-v{number}" for number in range(1, NUM_VERSIONS + 1)]


ON_GPU: Final = Models(model="qwen3-1.7b", drafter="qwen3-drafter", published="qwen3-8b")
REHEARSAL: Final = Models(model="tiny", drafter="tiny-drafter", published="tiny")


def write_models(directory: Path, models: Models) -> None:
    for shape in (models.drafter, models.model):
        write_model(directory / shape, shape, equal_layers=True, repeats=True)
    first, *others = (directory / version for version in models.versions())
    write_model(first, models.published, equal_layers=True)
    for other in others:
        other.mkdir(exist_ok=True)
        for file in first.iterdir():
            if not (other / file.name).exists():
                os.link(file, other / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    write_models(given.directory, REHEARSAL if given.rehearse else ON_GPU)


if __name__ == "__main__":
    main()
