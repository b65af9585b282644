"""Pages with generated text, by file, and the generators of that text."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.reference import commands, errors, http_api, limits, metrics, python_types, settings

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: dict[Path, dict[str, Callable[[], Iterable[str]]]] = {
    FOLDER / "settings.md": {"settings": settings.lines},
    FOLDER / "http-api.md": {
        "routes": http_api.route_lines,
        "operations": http_api.operation_lines,
        "schemas": http_api.schema_lines,
    },
    FOLDER / "errors.md": {"errors": errors.lines},
    FOLDER / "limits.md": {"limits": limits.lines, "fields": limits.field_lines},
    FOLDER / "metrics.md": {"metrics": metrics.lines},
    FOLDER / "python-api.md": {
        "exceptions": python_types.exception_lines,
        "types": python_types.type_lines,
    },
    FOLDER / "cli.md": {"commands": commands.lines},
}
END = "<!-- end of generated text -->"


def rendered(page: Path) -> str:
    """The page with its generated text; AssertionError if a pair of comments is missing."""
    text = page.read_text(encoding="utf-8")
    for name, lines in PAGES[page].items():
        begin = f"<!-- generated: {name} -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(END)
        assert found and ended, f"{page.name} has no {begin}"
        generated = "\n".join(lines()).strip()
        text = f"{before}{begin}\n\n{generated}\n\n{END}{after}"
    return re.sub(r"\n{3,}", "\n\n", text)


def is_up_to_date(page: Path) -> bool:
    return page.read_text(encoding="utf-8") == rendered(page)
