"""Model lookup: local, downloaded at the pinned revision, or one error sentence."""

from pathlib import Path

import pytest

from engine.errors import StartFailed
from engine.launch.model_files import resolve_model

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("model", "revision", "reason"),
    [
        ("/nowhere/at/all", None, "the model directory /nowhere/at/all does not exist"),
        ("seedling", None, "the model directory seedling does not exist"),
        ("org/name", None, "set engine.revision to a commit"),
        ("org/name", "main", "set engine.revision to a commit"),
    ],
)
def test_missing_model_is_one_sentence(model: str, revision: str | None, reason: str) -> None:
    with pytest.raises(StartFailed, match=reason):
        resolve_model(model, revision)


def test_directory_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"it has no config\.json"):
        resolve_model(str(tmp_path), None)
    (tmp_path / "config.json").touch()
    with pytest.raises(StartFailed, match=r"has no \*\.safetensors file"):
        resolve_model(str(tmp_path), None)
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path), None) == tmp_path


def test_model_with_random_weights_needs_no_weights_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path), None, with_weights=False) == tmp_path
    downloaded: list[object] = []

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        downloaded.extend(allow_patterns)
        return str(tmp_path)

    resolve_model("org/name", COMMIT, download, with_weights=False)
    assert "*.json" in downloaded and "*.safetensors" not in downloaded


def test_unreachable_hub_is_one_sentence() -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("Name or service\nnot known")

    with pytest.raises(StartFailed, match="from the model hub: Name or service not known"):
        resolve_model("org/name", COMMIT, download)


def test_pinned_model_is_fetched_at_its_revision_and_minimally(tmp_path: Path) -> None:
    asked: dict[str, object] = {}

    def download(model: str, **options: object) -> str:
        asked.update(options, model=model)
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).touch()
        return str(tmp_path)

    assert resolve_model("org/name", COMMIT, download) == tmp_path
    assert (asked["model"], asked["revision"]) == ("org/name", COMMIT)
    assert "*.bin" not in str(asked["allow_patterns"])


@pytest.mark.parametrize("with_code", [False, True])
def test_python_files_are_fetched_only_if_they_may_run(tmp_path: Path, with_code: bool) -> None:
    asked: dict[str, list[str]] = {}

    def download(model: str, *, allow_patterns: list[str], **options: object) -> str:
        asked["patterns"] = allow_patterns
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).touch()
        return str(tmp_path)

    resolve_model("org/name", COMMIT, download, with_code=with_code)
    assert ("*.py" in asked["patterns"]) == with_code
