"""Structure of the product: no circle of imports between the rooms of service/ and of engine/."""

from pathlib import Path

import pytest

from scripts.structure import (
    ROOT,
    arrows,
    circle,
    large_folders,
    large_functions,
    large_modules,
)


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


def test_what_exceeds_a_limit_is_found(tmp_path: Path) -> None:
    top = tmp_path / "pack"
    top.mkdir()
    for number in range(16):
        (top / f"m{number}.py").touch()
    (top / "m0.py").write_text("x = 1\n" * 351)
    (top / "m1.py").write_text("x = 1\n" * 350)
    (top / "m2.py").write_text("def f():\n" + "    x = 1\n" * 41)
    (top / "m3.py").write_text('def f(\n):\n    """Docstring."""\n' + "    x = 1\n" * 40)
    assert [*large_folders(top)] == ["pack: 16 modules"]
    assert [*large_modules(top)] == ["pack/m0.py: 351 lines"]
    assert [*large_functions(top)] == ["pack/m2.py:1 f: 41 lines"]
