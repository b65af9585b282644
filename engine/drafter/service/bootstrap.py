"""The initial drafter of a model: a given one, or a randomly initialized one."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from engine.drafter.service.checkpoint_dir import DrafterDir
from engine.drafter.service.model_init import (
    checkpoint_cost,
    make_drafter_config,
    write_random_model,
)
from engine.errors import StartFailed
from engine.weights.checkpoint import SINGLE_FILE, Checkpoint


def open_drafter_dir(
    directory: Path, initial: Path | None, target: Path, served: Checkpoint, *, ranks: int
) -> DrafterDir:
    """Open the directory of drafters for a target model, continuing with that of an earlier run.

    `initial` is a model directory, or None for random initialization. The directory name is a
    digest of the target's configuration and of the initial drafter. Raises StartFailed if the two
    are incompatible.
    """
    config = _config(target)
    if initial is not None:
        _check_vocabulary(config, _config(initial), initial)
        return DrafterDir(
            directory, _digest(config, _fingerprint(initial)), lambda to: _copy(initial, to)
        )
    new_config = make_drafter_config(config, checkpoint_cost(served), ranks=ranks)
    return DrafterDir(
        directory, _digest(config, new_config), lambda to: write_random_model(to, new_config)
    )


def _config(model: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise StartFailed(f"{model} is no model directory: {error}") from error
    return config


def _check_vocabulary(target: dict[str, Any], drafter: dict[str, Any], initial: Path) -> None:
    sizes = [config.get("text_config", config).get("vocab_size") for config in (target, drafter)]
    if sizes[0] != sizes[1]:
        raise StartFailed(f"{initial} drafts from {sizes[1]} tokens, the model has {sizes[0]}")
    if not (initial / SINGLE_FILE).is_file():
        raise StartFailed(f"{initial} has no {SINGLE_FILE}; a drafter is one file")


def _fingerprint(initial: Path) -> dict[str, Any]:
    state = (initial / SINGLE_FILE).stat()
    return {
        "path": str(initial.resolve()),
        "bytes": state.st_size,
        "changed": state.st_mtime_ns,
        "config": _config(initial),
    }


def _digest(target: dict[str, Any], drafter: dict[str, Any]) -> str:
    text = json.dumps([target, drafter], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _copy(initial: Path, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for name in ("config.json", SINGLE_FILE):
        shutil.copyfile(initial / name, to / name)
