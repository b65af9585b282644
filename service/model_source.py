"""Where the model comes from: a local directory, or a pinned commit of a hub's repository."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import StartFailed
from engine.settings import EngineSettings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]

log = logging.getLogger(__name__)


def download_snapshot(*arguments: Any, **options: Any) -> str:
    # Slow to import, and needed for a hub id only.
    from huggingface_hub import snapshot_download

    return str(snapshot_download(*arguments, **options))


def fetch_model(settings: EngineSettings, download: Callable[..., str] = download_snapshot) -> None:
    """Makes sure that the model's files are on this machine. StartFailed says why they are not."""
    path = Path(settings.model)
    if path.is_dir():
        _check_directory(path)
    elif not _HUB_ID.fullmatch(settings.model):
        raise StartFailed(f"there is no model directory {settings.model}")
    elif not _COMMIT.fullmatch(settings.revision or ""):
        raise StartFailed(
            f"{settings.model} is not a directory here; to take it from the model hub, pin it with "
            "engine.revision, the 40 hexadecimal digits of a commit"
        )
    else:
        _fetch(settings, download)


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise StartFailed(f"{path} is not a model directory: it has no config.json")
    if not any(path.glob("*.safetensors")):
        raise StartFailed(f"{path} holds no *.safetensors file; other formats are not served")


def _fetch(settings: EngineSettings, download: Callable[..., str]) -> None:
    """Into the hub's own cache, where the engine looks for it; nothing is fetched twice."""
    log.info("fetching %s at %s from the model hub", settings.model, settings.revision)
    try:
        download(settings.model, revision=settings.revision, allow_patterns=_FILES)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise StartFailed(
            f"{settings.model} at {settings.revision} could not be fetched from the model hub: "
            f"{reason}"
        ) from error
