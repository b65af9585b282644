"""Resolution of a model name to files: a local directory, or a pinned hub commit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import StartFailed
from engine.settings import EngineSettings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = "*.safetensors"


def download_snapshot(*arguments: Any, **options: Any) -> str:
    # Slow to import and only needed for a hub id.
    from huggingface_hub import snapshot_download

    return str(snapshot_download(*arguments, **options))


def resolve_model(
    model: str,
    revision: str | None,
    download: Callable[..., str] = download_snapshot,
    *,
    with_code: bool = False,
    with_weights: bool = True,
) -> Path:
    """The model's local directory, downloaded with its Python code if `with_code`.

    Raises StartFailed with the reason if there is none.
    """
    files = [*_FILES, *([WEIGHTS] if with_weights else []), *(["*.py"] if with_code else [])]
    directory = _resolve(model, revision, download, files)
    if with_weights and not any(directory.glob(WEIGHTS)):
        raise StartFailed(f"{directory} has no *.safetensors file; other formats are not supported")
    return directory


def resolve_served_model(settings: EngineSettings) -> Path:
    """Directory of `engine.model`, with its Python code if the settings trust it."""
    return resolve_model(
        settings.model,
        settings.revision,
        with_code=settings.trust_remote_code,
        with_weights=not settings.has_random_weights,
    )


def resolve_model_config(
    model: str, revision: str | None, download: Callable[..., str] = download_snapshot
) -> Path:
    """A directory with the model's config.json, the only file that is downloaded."""
    return _resolve(model, revision, download, ["config.json"])


def _resolve(
    model: str, revision: str | None, download: Callable[..., str], files: list[str]
) -> Path:
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _require_config(directory.resolve())
    if not _HUB_ID.fullmatch(model):
        raise StartFailed(f"the model directory {model} does not exist")
    if not _COMMIT.fullmatch(revision or ""):
        raise StartFailed(
            f"{model} is not a local directory; to download it from the model hub, set "
            "engine.revision to a commit hash of 40 hexadecimal digits"
        )
    return _require_config(_download(model, revision, download, files))


def _require_config(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise StartFailed(f"{directory} is not a model directory: it has no config.json")
    return directory


def _download(
    model: str, revision: str | None, download: Callable[..., str], files: list[str]
) -> Path:
    """Download a model's files into the model hub's cache, unless they are cached."""
    try:
        return Path(download(model, revision=revision, allow_patterns=files))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise StartFailed(
            f"{model} at {revision} could not be downloaded from the model hub: {reason}; "
            "engine.model may be a local directory instead"
        ) from error
