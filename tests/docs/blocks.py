"""Code blocks of the documentation and the marker above each: how it is executed, or why not.

A fenced `bash` or `python` block has an HTML comment on the line above its opening fence:

    <!-- run: server -->     executed; http://127.0.0.1:8000 is a server of the bundled model
    <!-- run: shell -->      executed, without a server
    <!-- run: settings -->   above a `yaml` block: validated as a settings file
    <!-- tested by: tests/path/test_x.py::test_name -->    that test executes these commands
    <!-- not run: needs a GPU -->    or one of the other reasons in REASONS

A block with the title of a file shows code of that file: ```python title="examples/x.py".
"""

import re
import textwrap
from codeop import compile_command
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = ("bash", "python")
OTHER_NAMES = ("sh", "shell", "zsh", "console", "shell-session", "py", "python3", "pycon")
RUNS = ("server", "shell", "settings")
REASONS = re.compile(r"needs (a GPU|Docker|a Kubernetes cluster)|takes [1-9]\d* (minutes|hours)")

_BLOCK = re.compile(
    r"^(?P<above>.*)\n(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w-]*)(?P<info>.*)\n"
    r"(?P<text>(?:.*\n)*?) *(?P=fence) *$",
    re.MULTILINE,
)
_MARKER = re.compile(r"^ *<!-- (?P<kind>run|tested by|not run): (?P<value>.+) -->$")
_SERVE = re.compile(r"\b(coppice|make|-m service) serve\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    above: str
    title: str = ""
    """File of the repository whose code the block shows."""

    @property
    def place(self) -> str:
        return (
            f"{self.page}:{self.line} ({self.language}: {self.text.strip().partition(chr(10))[0]})"
        )

    @property
    def marker(self) -> tuple[str, str]:
        """Kind and value of the marker; empty strings without one."""
        found = _MARKER.match(self.above)
        return (found["kind"], found["value"]) if found else ("", "")

    @property
    def is_executed(self) -> bool:
        return self.marker in (("run", "server"), ("run", "shell"))

    @property
    def starts_server(self) -> bool:
        return self.is_executed and bool(_SERVE.search(self.text))


def pages() -> list[str]:
    """README.md and the pages of docs/; decisions are records and not instructions."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
    return ["README.md", *(page for page in found if not page.startswith("docs/decisions/"))]


def blocks(page: str, text: str | None = None) -> list[Block]:
    return list(_blocks(page, text if text is not None else (ROOT / page).read_text()))


def _blocks(page: str, text: str) -> Iterator[Block]:
    # Two lines in front, so that a block in the first line has a line above it.
    text = "\n" + text
    for found in _BLOCK.finditer(text):
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start("fence")),
            language=found["language"],
            text=textwrap.dedent(found["text"]),
            above=found["above"],
            title=_title(found["info"]),
        )


def _title(info: str) -> str:
    found = re.search(r'title="([^"]+)"', info)
    return found[1] if found else ""


def problems(block: Block) -> Iterator[str]:
    """Reasons why the block and its marker are refused."""
    kind, value = block.marker
    if block.language in OTHER_NAMES:
        yield f"write ```bash or ```python instead of ```{block.language}"
    if block.language in COMMANDS and not kind:
        yield f"no marker of the form <!-- run: server --> on the line above, but {block.above!r}"
    if not kind and block.above.strip().startswith("<!-- "):
        yield f"unknown marker {block.above.strip()}"
    if kind == "run" and value not in RUNS:
        yield f"unknown marker {block.above.strip()}"
    if kind == "run" and (value == "settings") != (block.language == "yaml"):
        yield f"{block.above.strip()} does not fit a block of {block.language or 'no language'}"
    if kind == "not run" and not REASONS.fullmatch(value):
        yield f"not a reason for leaving a block out: {value}"
    if kind == "tested by" and not is_test(value):
        yield f"no such test: {value}"
    if block.language == "python" and block.is_executed and not is_for_repl(block.text):
        yield "cannot be pasted into a Python prompt: end each indented part by an empty line"


def is_for_repl(text: str) -> bool:
    """True if a Python prompt accepts the lines of a block one by one, with Enter at the end."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        lines.append(line)
        try:
            is_complete = compile_command("\n".join(lines)) is not None
        except SyntaxError:
            return False
        if is_complete or lines == [""]:
            lines = []
    return not lines


def is_test(node: str) -> bool:
    file, _, name = node.partition("::")
    if not re.fullmatch(r"tests/[\w/]+\.py", file) or not (ROOT / file).is_file():
        return False
    function = rf"^(async )?def {re.escape(name.partition('[')[0])}\("
    return name.startswith("test_") and bool(re.search(function, (ROOT / file).read_text(), re.M))
