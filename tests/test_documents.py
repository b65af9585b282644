"""Consistency of the documentation with tests and dependencies."""

import importlib.util
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FOLDERS = [
    "bench",
    "client",
    "docker",
    "docs",
    "engine",
    "examples",
    "helm",
    "kernels",
    "scripts",
    "service",
]
HISTORY = ("CHANGELOG.md", "bench/records/gpu/")
UNTRIED = re.compile(
    r"\b(?:not|never|nothing|none) [^.;|]{0,60}\b(?:run|ran|executed|measured|tested|tried)\b"
    r"[^.;|]{0,20}\bon (?:a |any )?GPUs?\b"
    r"|\bnot (?:yet )?(?:run|tested|tried): [^.;|]{0,40}\bGPUs?\b"
    r"|(?<!\bno )\bGPUs?\b[^.]{0,60}\b(?:not|never)(?: yet| been)* (?:run|tested|tried|measured)\b",
    re.IGNORECASE,
)
"""A statement that something has not been run on a GPU."""


def statements(path: str, text: str) -> list[str]:
    """Statements outside README's status section. Reasons not to execute a block are none."""
    if path == "README.md":
        text = re.sub(r"\n## Status\n.*?(?=\n## )", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- not run: .*?-->", "", text)
    return [f"{path}: {found}" for found in UNTRIED.findall(" ".join(text.split()))]


def test_files_that_contributors_are_to_change_exist() -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 50
    missing = [path for path in named if "NAME" not in path and not (ROOT / path).exists()]
    assert not missing


def test_only_the_status_table_states_what_has_not_run_on_a_gpu() -> None:
    suffixes = {".md", ".py", ".yaml", ".yml", ".svg", ".sh", ".toml", ".json", ".cpp", ".h"}
    files = [*ROOT.glob("*.*"), *(file for name in FOLDERS for file in (ROOT / name).rglob("*"))]
    paths = [str(file.relative_to(ROOT)) for file in files if file.suffix in suffixes]
    found = [
        statement
        for path in paths
        if not path.startswith(HISTORY)
        for statement in statements(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert len(paths) > 500 and found == []


@pytest.mark.parametrize(
    ("text", "is_statement"),
    [
        ("Nothing has\nbeen run on a GPU yet.", True),
        ("This has not been measured on a GPU.", True),
        ("| GPU | vLLM's own kernels; not run |", True),
        ("Not run: GPUs, more than one node.", True),
        ("<!-- not run: needs a GPU -->", False),
        ("All rows are from a CPU. On a GPU expect others.", False),
        ("| capability | not yet run on a GPU |", True),
    ],
)
def test_statements_about_gpus_are_found(text: str, is_statement: bool) -> None:
    assert bool(statements("docs/page.md", text)) == is_statement


def test_status_section_may_state_it() -> None:
    readme = "# A\n\n## Status\n\nnot run on a GPU\n\n## Results\n"
    assert statements("README.md", readme) == []
    assert statements("README.md", readme + "Nothing was run on a GPU.\n")


def test_gpu_column_of_the_status_table_is_that_of_the_records() -> None:
    status, readme = script("gpu_status"), (ROOT / "README.md").read_text()
    assert readme == status.rendered(readme, status.records()), "scripts/gpu_status.py"
    for record in status.records():
        assert sorted(record["capabilities"]) == sorted(status.keys(readme))


def test_gpu_column_has_the_latest_result_of_each_capability() -> None:
    ran = {"status": "ran", "what": "reads"}
    failed, not_run = {"status": "failed, fixed", "what": "x"}, {"status": "not run", "what": ""}
    runs = [
        {"gpu": "H100 80GB", "capabilities": {"a": failed, "b": ran, "c": not_run}},
        {"gpu": "H200", "capabilities": {"a": ran, "b": not_run, "c": not_run}},
    ]
    assert script("gpu_status").cells(runs) == {
        "a": "ran on an H200: reads",
        "b": "ran on an H100: reads",
        "c": "not run",
    }
    assert "fixed, not run again" in script("gpu_status").cells(runs[:1])["a"]


def test_tests_named_by_the_threat_model_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 15
    for file, function in named:
        text = (ROOT / file).read_text()
        assert not function or re.search(rf"^(async )?def {function}\(", text, re.MULTILINE), file


def test_page_states_every_invariant_with_its_tests() -> None:
    page = (ROOT / "docs/operate/reliability.md").read_text()
    rows = re.findall(r"^\| (P\d+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert [name for name, _, _ in rows] == [f"P{number}" for number in range(1, 11)]
    tests = {name: re.findall(r"`(tests/[\w/]+\.py)`", named) for name, _, named in rows}
    assert all(tests.values())
    assert [file for files in tests.values() for file in files if not (ROOT / file).exists()] == []
    for file in (ROOT / "tests" / "invariants").glob("test_p*.py"):
        path = str(file.relative_to(ROOT))
        for number in re.findall(r"p(\d+)_", file.name):
            assert path in tests[f"P{number}"]


def test_tests_of_publications_with_faults_exist() -> None:
    page = (ROOT / "docs/operate/reliability.md").read_text()
    section = page.partition("## Publications of weights with faults")[2].partition("\n## ")[0]
    named = re.findall(r"`(test_\w+)`", section)
    assert len(named) > 15
    files = [file.read_text() for file in (ROOT / "tests/service").rglob("test_*.py")]
    defined = set(re.findall(r"^(?:async )?def (test_\w+)\(", "\n".join(files), re.MULTILINE))
    assert set(named) <= defined


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
    parts = re.split("## Only on GPUs|## With Ray", dependencies.FILE.read_text())
    tables = [dependencies.ROW.findall(part)[1:] for part in parts]
    named = [[(name, version) for name, version, _ in table] for table in tables]
    expected = [dependencies.pinned("torch-cpu", "cpu"), dependencies.only_gpu()]
    expected.append(dependencies.pinned("ray"))
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
