"""Code that a page shows with the title of a file is the code of that file."""

import ast
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks, pages

SHOWN = [block for page in pages() for block in blocks(page) if (ROOT / block.title).is_file()]


def is_part(shown: str, code: str) -> bool:
    """Return whether consecutive statements of the code are those shown, apart from line breaks."""
    wanted = [ast.dump(statement) for statement in ast.parse(shown).body]
    for node in ast.walk(ast.parse(code)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            there = [ast.dump(statement) for statement in body]
            starts = range(len(there) - len(wanted) + 1)
            if any(there[start : start + len(wanted)] == wanted for start in starts):
                return True
    return False


def test_pages_show_code() -> None:
    assert len(SHOWN) >= 6


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.place)
def test_shown_code_is_that_of_the_file(block: Block) -> None:
    code = Path(ROOT / block.title).read_text()
    if block.language == "python":
        assert is_part(block.text, code)
    else:
        assert block.text == code


def test_code_that_differs_is_not_a_part() -> None:
    code = "def f():\n    a = [1,\n         2]\n    b = 3\n"
    assert is_part("a = [1, 2]", code)
    assert is_part("a = [1, 2]\nb = 3", code)
    assert not is_part("a = [1, 3]", code)
    assert not is_part("b = 3\na = [1, 2]", code)
