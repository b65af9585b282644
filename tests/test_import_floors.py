"""Imports inside service/ and engine/ run down: no circle of imports between their folders."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Arrows = dict[str, dict[str, str]]
"""Imports of each folder or module, each with one example as text."""


def modules(top: Path) -> dict[str, Path]:
    names = {file: file.relative_to(top.parent).with_suffix("").parts for file in top.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): file for file, parts in names.items()}


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of `known` that a file imports, also for types only or inside a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in submodules)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def arrows(top: Path) -> Arrows:
    """Imports between the folders and modules directly below `top`."""
    known = modules(top)
    del known[top.name]
    found: Arrows = {}
    for name, file in known.items():
        room = name.split(".")[1]
        for other in imported(file, known):
            if other in known and (target := other.split(".")[1]) != room:
                found.setdefault(room, {})[target] = f"{name} imports {other}"
    return found


def circle(found: Arrows) -> list[str]:
    """The imports of one circle; none if all imports run down."""
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return [found[room][target] for target, room in pairwise(error.args[1])]
    return []


@pytest.mark.parametrize("top", ["service", "engine"])
def test_imports_run_down(top: str) -> None:
    found = arrows(ROOT / top)
    assert len(found) > 10
    assert circle(found) == []


def test_circle_is_found(tmp_path: Path) -> None:
    texts = {
        "low": "",
        "a": "from pack.low import x\nfrom pack import b\n",
        "b": "def f():\n    import pack.a\n",
        "high": "import pack.a\n",
    }
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    for name, text in texts.items():
        (tmp_path / "pack" / name).mkdir()
        (tmp_path / "pack" / name / "__init__.py").write_text(text)
    assert sorted(circle(arrows(tmp_path / "pack"))) == [
        "pack.a imports pack.b",
        "pack.b imports pack.a",
    ]
