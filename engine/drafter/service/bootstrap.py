"""The drafter that a model is first served with: one that was given, or one made from nothing."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from engine.drafter.service.checkpoint_dir import Folder
from engine.drafter.service.model_init import config_for, num_multiplied, write_fresh
from engine.errors import StartFailed
from engine.weights.checkpoint import SINGLE_FILE, Checkpoint


def open_folder(
    directory: Path, given: Path | None, target: Path, served: Checkpoint, *, ranks: int
) -> Folder:
    """`given` is a model directory; what an earlier run has made of the same one is gone on with.

    The folder's name says what it was made for and from; StartFailed if that does not go together.
    """
    config = _config(target)
    if given is not None:
        _refuse_other_vocabulary(config, _config(given), given)
        return Folder(directory, _name(config, _stamp(given)), lambda to: _copy(given, to))
    fresh = config_for(config, num_multiplied(served), ranks=ranks)
    return Folder(directory, _name(config, fresh), lambda to: write_fresh(to, fresh))


def _config(model: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise StartFailed(f"{model} is no model directory: {error}") from error
    return config


def _refuse_other_vocabulary(target: dict[str, Any], drafter: dict[str, Any], given: Path) -> None:
    sizes = [config.get("text_config", config).get("vocab_size") for config in (target, drafter)]
    if sizes[0] != sizes[1]:
        raise StartFailed(f"{given} drafts from {sizes[1]} tokens, the model has {sizes[0]}")
    if not (given / SINGLE_FILE).is_file():
        raise StartFailed(f"{given} has no {SINGLE_FILE}; a drafter is one file")


def _stamp(given: Path) -> dict[str, Any]:
    state = (given / SINGLE_FILE).stat()
    return {
        "path": str(given.resolve()),
        "bytes": state.st_size,
        "changed": state.st_mtime_ns,
        "config": _config(given),
    }


def _name(target: dict[str, Any], drafter: dict[str, Any]) -> str:
    text = json.dumps([target, drafter], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _copy(given: Path, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for name in ("config.json", SINGLE_FILE):
        shutil.copyfile(given / name, to / name)
