"""Consistency of the documentation with tests and dependencies."""

import importlib.util
import re
import zipfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tests_named_by_the_threat_model_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 15
    for file, function in named:
        text = (ROOT / file).read_text()
        assert not function or re.search(rf"^(async )?def {function}\(", text, re.MULTILINE), file


def test_every_advisory_class_names_its_test() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition("## Known classes of vulnerability")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert all(row.rstrip(" |").rpartition("| ")[2].startswith("`tests/") for row in rows)


def test_pictures_of_the_diagrams_are_up_to_date() -> None:
    diagrams = script("diagrams")
    assert {"processes.svg", "one-rollout.svg"} <= diagrams.sources().keys()
    stale = [n for n, source in diagrams.sources().items() if not diagrams.is_up_to_date(n, source)]
    assert not stale and not diagrams.orphans(), "make diagrams"


def test_every_picture_of_the_diagrams_is_shown_on_a_page() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "".join(page.read_text() for page in pages)
    pictures = sorted((ROOT / "docs" / "diagrams").glob("*.svg"))
    assert [picture.name for picture in pictures if f"diagrams/{picture.name}" not in text] == []


def test_dependency_report_matches_the_lock_files() -> None:
    """Licences come from packages' metadata, names and versions from the lock files."""
    dependencies = script("dependencies")
    cpu, _, gpu = dependencies.FILE.read_text().partition("## Only on GPUs")
    tables = [dependencies.ROW.findall(part)[1:] for part in (cpu, gpu)]
    named = [[(name, version) for name, version, _ in table] for table in tables]
    expected = [dependencies.pinned("torch-cpu", "cpu"), dependencies.only_gpu()]
    assert named == expected, "python scripts/dependencies.py"
    proprietary = [licence for name, _, licence in tables[1] if name.startswith("nvidia-cu")]
    assert proprietary and all(
        text.startswith("**") for text in proprietary if "Apache" not in text
    )


def test_metadata_of_a_remote_wheel_is_read_without_the_rest(tmp_path: Path) -> None:
    dependencies = script("dependencies")
    wheel = tmp_path / "a-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/large.bin", bytes(2**22))
        archive.writestr("a-1.0.dist-info/METADATA", "Name: a\nLicense-Expression: MIT\n\nText")
    fetched = []

    def fetch(url: str, headers: dict[str, str]) -> bytes:
        first, last = map(int, headers["Range"].removeprefix("bytes=").split("-"))
        fetched.append(last + 1 - first)
        return wheel.read_bytes()[first : last + 1]

    dependencies.__dict__["fetch"] = fetch
    remote = dependencies.RemoteFile("https://index.example/a.whl", wheel.stat().st_size)
    assert dependencies.licence(dependencies.metadata_of(remote)) == "MIT"
    assert sum(fetched) < 2**19
