"""vLLM's code that the engine extends or calls although private is listed, and is as recorded."""

import ast
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.launch import vllm_seams
from engine.launch.vllm_seams import (
    Attribute,
    Seam,
    attributes_of,
    check_version,
    differences,
    installed_package,
    recorded_attributes,
    recorded_seams,
    seams_of,
)
from tests.engine.vllm_reads import read_attributes

ENGINE = Path(__file__).parents[2] / "engine"
SEAM = Seam(name="vllm.part:Thing.act", kind="patched", used_by="here.py")


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a vLLM name in one file: as a base class, by assignment, or of a private name."""

    file: str
    kind: str
    name: str


def uses(file: Path) -> Iterator[Use]:
    tree, relative = ast.parse(file.read_text()), str(file.relative_to(ENGINE))
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    for name in imported.values():
        if name.startswith("_") and name not in ("__version__", "_custom_ops"):
            yield Use(relative, "called", name)
    for node in ast.walk(tree):
        for kind, value in named(node):
            if isinstance(value, ast.Name) and value.id in imported:
                yield Use(relative, kind, imported[value.id])


def named(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Values that a statement or call subclasses or patches."""
    match node:
        case ast.ClassDef(bases=bases):
            yield from (("subclassed", base) for base in bases)
        case ast.Assign(targets=targets):
            yield from (("patched", t.value) for t in targets if isinstance(t, ast.Attribute))
        case ast.Call(func=ast.Name(id="setattr"), args=[target, *_]):
            yield "patched", target


def is_listed(use: Use, seams: list[Seam]) -> bool:
    """Return whether a use is listed: a patched class by methods, a module by any name in it."""
    mine = [seam for seam in seams if (seam.used_by, seam.kind) == (use.file, use.kind)]
    if use.kind == "patched":
        return bool(mine)
    return any(seam.name.endswith(f":{use.name}") for seam in mine)


def test_installed_vllm_is_as_recorded() -> None:
    recorded = recorded_seams()
    assert differences(seams_of(installed_package(), recorded), recorded) == []


def test_every_extended_or_private_name_of_vllm_is_listed() -> None:
    seams = recorded_seams()
    found = [use for file in sorted(ENGINE.rglob("*.py")) for use in uses(file)]
    assert len(found) > 20
    assert [use for use in found if not is_listed(use, seams)] == []


def test_listed_files_exist_and_use_vllm() -> None:
    assert all((ENGINE / seam.used_by).exists() for seam in recorded_seams())


def test_every_attribute_that_is_read_of_vllm_is_listed_with_the_methods_that_create_it() -> None:
    """After a change of what is read: `python -m tests.engine.vllm_reads`."""
    found, listed = read_attributes(), recorded_attributes()
    assert [each for each in found if each not in listed] == []
    assert [each for each in listed if each not in found] == []
    assert [each for each in listed if not each.assigned_in] == []
    created = {each.name: each.assigned_in for each in listed if "GPUModelRunner" in each.owner}
    assert created["attn_groups"] == ("initialize_kv_cache",)


WITH_ATTRIBUTES = """
class Thing:
    of_class = 1
    field: int
    def __init__(self): self.first, self.both = 1, 2
    def act(self):
        self.both: int = self.only_read
        self.first.part = self.first[0] = 3
    @property
    def computed(self): return 4
"""


def test_attribute_has_the_methods_that_assign_it(tmp_path: Path) -> None:
    expected = {
        "of_class": ("class",),
        "field": ("class",),
        "act": ("class",),
        "computed": ("class",),
        "first": ("__init__",),
        "both": ("__init__", "act"),
        "only_read": (),
        "missing": (),
    }
    listed = [Attribute(owner="vllm.part:Thing", name=name, used_by=()) for name in expected]
    found = attributes_of(package(tmp_path, WITH_ATTRIBUTES), listed)
    assert {each.name: each.assigned_in for each in found} == expected


def test_comparison_imports_nothing_of_vllm() -> None:
    """vLLM's CPU worker replaces parts of torch when it is imported."""
    program = (
        "import sys; from engine.launch.vllm_seams import *;"
        "seams_of(installed_package(), recorded_seams());"
        "attributes_of(installed_package(), recorded_attributes());"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ENGINE.parent, stdout=subprocess.PIPE, text=True
    )
    assert ran.returncode == 0 and ran.stdout == "[]\n"


def package(tmp_path: Path, text: str) -> Path:
    (tmp_path / "part.py").write_text(text)
    return tmp_path


OLD = "class Thing:\n    def act(self, x: int) -> None:\n        return\n"


@pytest.mark.parametrize(
    ("text", "change"),
    [
        (OLD.replace("return", "return None"), "has other code"),
        (OLD.replace("x: int", "x: int, y: int"), "has the signature (self, x: int, y: int) -> No"),
        (OLD.replace("act", "acts"), "is missing"),
        ("", "is missing"),
        (OLD.replace("    def", "    @property\n    def"), "has other code"),
    ],
)
def test_change_is_named(tmp_path: Path, text: str, change: str) -> None:
    then = seams_of(package(tmp_path, OLD), [SEAM])
    assert differences(then, then) == []
    [line] = differences(seams_of(package(tmp_path, text), [SEAM]), then)
    assert line.startswith(f"vllm.part:Thing.act {change}")
    assert line.endswith("(patched in here.py)")


def test_last_definition_counts_as_at_run_time(tmp_path: Path) -> None:
    other = OLD.replace("return", "pass")
    both = package(tmp_path, f"if True:\n{indented(OLD)}else:\n{indented(other)}")
    [found] = seams_of(both, [SEAM])
    (tmp_path / "part.py").write_text(f"if True:\n{indented(other)}")
    assert seams_of(tmp_path, [SEAM]) == [found]


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_supported_version_starts_silently(
    version: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_seams, "seams_of", lambda *_: pytest.fail("nothing to compare"))
    check_version(version)
    assert not caplog.records


def test_other_version_is_warned_of_once_with_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "v1/worker/gpu/block_table.py"
    for seam in recorded_seams():
        (tmp_path / seam.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed_package() / seam.path, tmp_path / seam.path)
    changed = (tmp_path / file).read_text().replace("def append_block_ids(", "def append_blocks(")
    (tmp_path / file).write_text(changed)
    monkeypatch.setattr(vllm_seams, "installed_package", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        check_version("0.33.0")
    [message] = caplog.messages
    assert message.startswith("vLLM 0.33.0 is installed, 0.32.0 is supported.")
    assert "1 differ: vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids is mis" in message
    assert message.endswith("(patched in attention/cuda_steps.py)")


def test_start_checks_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import __version__ as vllm_version

    from engine.errors import StartFailed
    from engine.feature_base import StartSettings
    from engine.features import Features
    from engine.launch import processes
    from engine.settings import EngineSettings

    checked: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        raise StartFailed("far enough")

    monkeypatch.setattr(processes, "check_version", checked.append)
    monkeypatch.setattr(processes, "engine_arguments", refuse)
    settings = EngineSettings()
    starting = processes.VllmProcesses(
        settings, Features(StartSettings(engine=settings)), worker_extension=""
    )
    with pytest.raises(StartFailed, match="far enough"):
        starting._start(Path("model"))
    starting._shut_down(None)
    assert checked == [vllm_version]
