"""Generated reference pages are up to date, and say what a reader needs."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import coppice.session_rows
import coppice.train
from coppice.wire.problem_catalogue import PROBLEMS
from scripts.reference import http_api
from scripts.reference.pages import FOLDER, PAGES, is_up_to_date, rendered
from scripts.reference.settings import advice
from scripts.reference.types import constraints, type_text
from service.config.settings import settings_fields
from tests.contract.models import wire_models
from tests.monitoring.series import families
from tests.tools import ROOT

UNITS = ("seconds", "bytes", "tokens", "bytes_per_second")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_page_is_up_to_date(page: Path) -> None:
    assert is_up_to_date(page), "make reference"


def test_outdated_page_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "errors.md"
    source = FOLDER / "errors.md"
    page.write_text(source.read_text().replace("`kv_gone`", "`kv_left`"))
    monkeypatch.setitem(PAGES, page, PAGES[source])
    assert not is_up_to_date(page)
    assert rendered(page) == source.read_text()


@pytest.mark.parametrize("setting", [f"{s}.{n}" for s, n, _ in settings_fields()])
def test_every_setting_has_its_names_and_a_reason_to_change_it(setting: str) -> None:
    section, name = setting.split(".")
    field = next(f for s, n, f in settings_fields() if (s, n) == (section, name))
    assert advice(field.description or ""), "say when to change it: 'increase it if ...'"
    text = (FOLDER / "settings.md").read_text()
    entry = text.partition(f"{{ #{setting} }}")[2].partition("\n### ")[0]
    assert f"`--{setting.replace('_', '-')}`" in entry
    assert f"`COPPICE_{section.upper()}__{name.upper()}`" in entry
    if name.endswith(UNITS):
        assert ", in " in entry


def test_every_metric_is_listed() -> None:
    text = (FOLDER / "metrics.md").read_text()
    for name, family in families().items():
        suffix = "_total" if family.type == "counter" else ""
        assert f"| `{name}{suffix}` | {family.type}" in text
        assert family.documentation in text


def test_every_error_has_an_anchor() -> None:
    text = (FOLDER / "errors.md").read_text()
    assert all(f'<a id="{code}"></a>' in text for code in PROBLEMS)


def test_every_route_and_schema_of_the_contract_is_listed() -> None:
    text = (FOLDER / "http-api.md").read_text()
    contract = yaml.safe_load((ROOT / "openapi.yaml").read_text())
    for path, item in contract["paths"].items():
        for method in http_api.METHODS:
            assert (f"\n### `{method.upper()} {path}`" in text) == (method in item)
    assert all(f"\n### `{name}`" in text for name in contract["components"]["schemas"])


def test_every_public_name_of_the_client_is_in_the_python_reference() -> None:
    text = (FOLDER / "python-api.md").read_text()
    aliases = {"PromptLike", "Record"}  # unions of documented types
    for name in set(coppice.__all__) - aliases:
        assert f"::: coppice.{name}\n" in text or f"`{name}`" in text, name
    aliases = {"Baseline", "LossFunction", "Schedule", "TokenWeights"}
    for name in set(coppice.train.__all__) - aliases:
        assert re.search(rf"::: coppice\.train\.(\w+\.)?{name}\n", text), name


def public_names(module: ModuleType) -> set[str]:
    """Functions and classes that a module defines and that are documented for callers."""
    return {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }


def test_every_name_of_the_session_rows_is_in_the_python_reference() -> None:
    text = (FOLDER / "python-api.md").read_text()
    for name in public_names(coppice.session_rows):
        assert f"::: coppice.session_rows.{name}\n" in text, name


IMPORT = re.compile(r"^ *from (coppice[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def imported_names(page: Path) -> set[str]:
    """Names that the code of a page imports from the client."""
    imports = (one or many for _, many, one in IMPORT.findall(page.read_text()))
    return {
        name.partition(" as ")[0].strip()
        for found in imports
        for name in found.split(",")
        if name.strip()
    }


def test_every_name_that_the_documentation_imports_is_in_the_python_reference() -> None:
    text = (FOLDER / "python-api.md").read_text()
    pages = [*FOLDER.parent.rglob("*.md"), ROOT / "README.md", ROOT / "client" / "README.md"]
    found = {name for page in pages for name in imported_names(page)}
    assert {"SupportReplay", "session_rows", "grouped_backward"} <= found
    for name in found:
        assert re.search(rf"::: coppice\.[\w.]*\b{name}\n", text) or f"`{name}`" in text, name


def bodies() -> list[tuple[str, object]]:
    """Examples of bodies in the contract, with the name of their schema."""
    contract = yaml.safe_load((ROOT / "openapi.yaml").read_text())
    found: list[tuple[str, object]] = []

    def collect(node: object) -> None:
        if isinstance(node, dict):
            if "example" in node and "schema" in node:
                found.append((node["schema"]["$ref"].rpartition("/")[2], node["example"]))
            for part in node.values():
                collect(part)
        elif isinstance(node, list):
            for part in node:
                collect(part)

    collect(contract)
    return found


def test_examples_of_bodies_are_valid() -> None:
    assert len(bodies()) > 15
    for name, example in bodies():
        wire_models()[name].model_validate(example)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 1}, "integer, at least 1"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"type": ["integer", "null"]}, "integer or null"),
        (
            {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
            "string or null, at most 2 characters",
        ),
        ({"enum": [8, 16]}, "`8`, `16`"),
        ({"const": True}, "`true`"),
        ({"const": 1}, "`1`"),
        (
            {"type": "array", "maxItems": 9, "items": {"type": "number", "maximum": 0}},
            "list of number (at most 0), at most 9 elements",
        ),
        (
            {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "array", "maxItems": 2}]},
            "integer (at least 1) or list (at most 2 elements)",
        ),
        ({"$ref": "#/components/schemas/A"}, "[`A`](#a)"),
        ({"type": "string", "pattern": "a|b"}, "string, matches `a\\|b`"),
    ],
)
def test_type_is_written_in_words(schema: dict[str, object], text: str) -> None:
    assert ", ".join([type_text(schema, {"A": "#a"}), *constraints(schema)]) == text
