"""List of all vLLM internals that Coppice subclasses, patches or calls, with source digests.

`vllm_seams.json` is the list: each class or function as `module:qualified name`, the kind of use,
the file here that needs it, and its signature and source digest in the supported version. `called`
includes code that calls ours, and classes whose attributes are read.

`vllm_attributes.json` lists the attributes of vLLM's objects that the code here reads, each with
the class that has it and the methods that assign it: an attribute does not exist before the first
of them was called. "class" stands for methods, properties, fields and other names of the class.
`python -m tests.engine.vllm_reads` writes this list.

Digests are made from vLLM's source files without importing it. So a wheel for GPUs can be compared
on a machine without one, and installed patches do not matter. A start with another version of vLLM
logs what differs. After a change of the list or of the supported version, run

    python -m engine.launch.vllm_seams
"""

import ast
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

SUPPORTED_VERSION: Final = "0.32.0"
LIST: Final = Path(__file__).with_suffix(".json")
ATTRIBUTES: Final = Path(__file__).with_name("vllm_attributes.json")
OF_CLASS: Final = "class"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A class or function of vLLM that the code in `used_by` depends on.

    `signature` and `digest` are empty where vLLM does not define it. For a class, `signature` is
    its bases.
    """

    name: str
    kind: Literal["subclassed", "patched", "called"]
    used_by: str
    signature: str = ""
    digest: str = ""

    @property
    def path(self) -> str:
        """Source file, relative to vLLM's package directory."""
        return self.name.partition(":")[0].removeprefix("vllm.").replace(".", "/") + ".py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """An attribute of a vLLM class that files here read, and the methods that assign it.

    `assigned_in` is in the order of the source, and empty where vLLM does not define it.
    """

    owner: str
    name: str
    assigned_in: tuple[str, ...] = ()
    used_by: tuple[str, ...]


def recorded_attributes() -> list[Attribute]:
    """The attributes with the methods that assign them in the supported version."""
    stored: list[dict[str, Any]] = json.loads(ATTRIBUTES.read_text())
    return [
        Attribute(
            owner=each["owner"],
            name=each["name"],
            assigned_in=tuple(each["assigned_in"]),
            used_by=tuple(each["used_by"]),
        )
        for each in stored
    ]


def attributes_of(package: Path, listed: Sequence[Attribute]) -> list[Attribute]:
    """The listed attributes with the methods that assign them in a vLLM package directory."""
    classes = {owner: _class_in(package, owner) for owner in {each.owner for each in listed}}
    return [
        replace(each, assigned_in=_assigned_in(classes[each.owner], each.name)) for each in listed
    ]


def _class_in(package: Path, owner: str) -> Definition | None:
    seam = Seam(name=owner, kind="called", used_by="")
    return _find(ast.parse(_read(package / seam.path)), owner.partition(":")[2].split("."))


def _assigned_in(owner: Definition | None, name: str) -> tuple[str, ...]:
    body = [] if owner is None else owner.body
    if any(name in _names(node) for node in body):
        return (OF_CLASS,)
    methods = [node for node in body if isinstance(node, ast.FunctionDef)]
    return tuple(node.name for node in methods if name in _assigned_to_self(node))


def _names(node: ast.stmt) -> set[str]:
    """Names that a statement of a class body defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    return {target.id for target in _targets(node) if isinstance(target, ast.Name)}


def _assigned_to_self(method: ast.FunctionDef) -> set[str]:
    return {
        target.attr
        for node in ast.walk(method)
        for target in _targets(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and ast.unparse(target.value) == "self"
    }


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    """Targets of an assignment with all of their parts."""
    if isinstance(node, ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ast.walk(target)


def recorded_seams() -> list[Seam]:
    """The seams with their signatures and digests in the supported version."""
    stored: list[dict[str, Any]] = json.loads(LIST.read_text())
    return [Seam(**seam) for seam in stored]


def seams_of(package: Path, listed: Sequence[Seam]) -> list[Seam]:
    """The listed seams with their signatures and digests in a vLLM package directory."""
    texts = {seam.path: _read(package / seam.path) for seam in listed}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    return [_located(seam, texts[seam.path], trees[seam.path]) for seam in listed]


def differences(found: Sequence[Seam], expected: Sequence[Seam]) -> list[str]:
    """One line for each seam that differs, with the file that depends on it."""
    pairs = zip(found, expected, strict=True)
    return [_difference(now, then) for now, then in pairs if now != then]


def check_version(version: str) -> None:
    """Log one warning if vLLM is not the supported version, with the seams that differ."""
    if version.partition("+")[0] == SUPPORTED_VERSION:
        return
    expected = recorded_seams()
    lines = differences(seams_of(installed_package(), expected), expected)
    log.warning(
        "vLLM %s is installed, %s is supported. Of the %d classes and functions of vLLM that "
        "Coppice extends or calls although they are private, %d differ%s",
        version,
        SUPPORTED_VERSION,
        len(expected),
        len(lines),
        ": " + "; ".join(lines) if lines else "",
    )


def installed_package() -> Path:
    """vLLM's package directory, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations, "vLLM is installed"
    return Path(next(iter(spec.submodule_search_locations)))


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _difference(now: Seam, then: Seam) -> str:
    if not now.digest:
        change = "is missing"
    elif now.signature != then.signature:
        change = f"has the signature {now.signature}"
    else:
        change = "has other code"
    return f"{now.name} {change} ({now.kind} in {now.used_by})"


def _located(seam: Seam, text: str, tree: ast.Module) -> Seam:
    node = _find(tree, seam.name.partition(":")[2].split("."))
    if node is None:
        return replace(seam, signature="", digest="")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = "\n".join(text.split("\n")[first - 1 : node.end_lineno])
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return replace(seam, signature=_signature(node), digest=digest)


def _find(tree: ast.Module, names: Sequence[str]) -> Definition | None:
    """The last definition of a qualified name, also within `if` and `try`."""
    body, node = tree.body, None
    for name in names:
        named = (d for d in _definitions(body) if d.name == name)
        node = next(reversed(list(named)), None)
        if node is None:
            return None
        body = node.body
    return node


def _definitions(body: Sequence[ast.stmt]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, Definition):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions([*node.body, *node.orelse])


def _signature(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(map(ast.unparse, node.bases))})"
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returned}"


def main() -> None:
    seams = seams_of(installed_package(), recorded_seams())
    missing = [seam.name for seam in seams if not seam.digest]
    assert not missing, f"the installed vLLM does not define {missing}"
    ordered = sorted(seams, key=lambda seam: (seam.used_by, seam.name))
    lines = ",\n".join(json.dumps(asdict(seam)) for seam in ordered)
    LIST.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
