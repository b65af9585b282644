"""From the model's name to a local directory of safetensors files."""

from pathlib import Path

from engine.errors import StartFailed

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]


def locate(model: str, revision: str | None) -> Path:
    """A directory as it is; an id on a hub at its pinned revision, cached or downloaded."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _checked(directory.resolve())
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise StartFailed(f"there is no model directory {model!r}")
    if revision is None:
        raise StartFailed(f"{model!r} is an id on a model hub: pin its revision (engine.revision)")
    return _checked(_download(model, revision))


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise StartFailed(f"{directory} holds no config.json, so it is no model")
    if not any(directory.glob("*.safetensors")):
        raise StartFailed(f"{directory} holds no safetensors file; other formats are not loaded")
    return directory


def _download(model: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_WANTED))
    except (RepositoryNotFoundError, HfHubHTTPError) as error:
        raise StartFailed(f"the model hub does not give {model!r} at {revision!r}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise StartFailed(
            f"the model hub cannot be reached for {model!r}, and it is not cached: "
            "give a local directory instead"
        ) from error
