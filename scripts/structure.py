"""Size and structure of the product: lines, modules, settings, private vLLM code, imports.

    python -m scripts.structure

Prints a table, and then what exceeds a limit: a folder of more than 15 modules, a module of more
than 350 lines, a function with a body of more than 40 lines, a circle of imports between the rooms
of service/ or of engine/. A room is a folder or module directly below one of them; without circles,
rooms have floors such that all imports run down. The exit status is 1 if anything exceeds a limit.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from service.config.settings import settings_fields

ROOT = Path(__file__).parents[1]
PRODUCT = ("service", "engine", "kernels", "client/coppice")
MAX_MODULES, MAX_LINES, MAX_FUNCTION_LINES = 15, 350, 40
LAYERED = ("service", "engine")
SEAMS = ROOT / "engine" / "launch" / "vllm_seams.json"
SOURCES = (".py", ".cpp", ".h", ".js", ".css", ".html")

Arrows = dict[str, dict[str, str]]
"""Imports of each room by imported room, each with one example as text."""


def modules(top: Path) -> dict[str, Path]:
    """The modules of a package by their full name."""
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
    """Imports between the rooms of a package."""
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


def large_folders(top: Path) -> Iterator[str]:
    """Folders with too many modules, `__init__.py` not counted."""
    counts = Counter(file.parent for file in top.rglob("*.py") if file.name != "__init__.py")
    for folder, count in sorted(counts.items()):
        if count > MAX_MODULES:
            yield f"{folder.relative_to(top.parent)}: {count} modules"


def large_modules(top: Path) -> Iterator[str]:
    """Modules with too many lines."""
    for file in sorted(top.rglob("*.py")):
        if (count := _lines(file)) > MAX_LINES:
            yield f"{file.relative_to(top.parent)}: {count} lines"


def large_functions(top: Path) -> Iterator[str]:
    """Functions with too many lines, without signature and docstring."""
    for file in sorted(top.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                count = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if count > MAX_FUNCTION_LINES:
                    yield f"{file.relative_to(top.parent)}:{node.lineno} {node.name}: {count} lines"


def faults() -> list[str]:
    """Everything that exceeds a limit."""
    found = []
    for top in (ROOT / name for name in PRODUCT):
        found += [*large_folders(top), *large_modules(top), *large_functions(top)]
    for name in LAYERED:
        found += [f"circle of imports: {each}" for each in circle(arrows(ROOT / name))]
    return found


def table() -> str:
    """Lines and modules of each part, settings, and uses of private vLLM code, in Markdown."""
    rows = ["| | lines | modules |", "|---|---|---|"]
    rows += [_row(name, *_size(ROOT / name)) for name in PRODUCT]
    sizes = [_size(ROOT / name) for name in PRODUCT]
    rows.append(_row("product", *(sum(column) for column in zip(*sizes, strict=True))))
    rows.append(_row("tests", *_size(ROOT / "tests")))
    kinds = Counter(seam["kind"] for seam in json.loads(SEAMS.read_text()))
    seams = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    settings = sum(1 for _ in settings_fields())
    return "\n".join([*rows, "", f"settings: {settings}", f"private vLLM code: {seams}"])


def _size(top: Path) -> tuple[int, int]:
    files = [file for file in top.rglob("*") if file.suffix in SOURCES and file.is_file()]
    python = [file for file in files if file.suffix == ".py"]
    return sum(map(_lines, files)), len(python)


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def _row(name: str, lines: int, num_modules: int) -> str:
    return f"| {name} | {lines:,} | {num_modules} |"


def main() -> None:
    print(table())
    if found := faults():
        print(f"\nabove a limit ({len(found)}):", *found, sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
