"""Golden renders of the chart's examples, for reviews. Run `python -m helm.golden`.

Rendered with Helm's own engine, from the library helm-python-sdk.
"""

from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

HERE = Path(__file__).parent
CHART = HERE / "coppice"
EXAMPLES = sorted((HERE / "examples").glob("*.yaml"))


@cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(str(CHART))


def templates(values: dict[str, Any], *, name: str = "rl", namespace: str = "rl") -> dict[str, str]:
    """Rendered text by template. Raises HelmError if the schema or the chart rejects the values."""
    texts: dict[str, str] = _chart().render(values, name=name, namespace=namespace)
    return texts


def render(example: Path) -> str:
    texts = templates(yaml.safe_load(example.read_text(encoding="utf-8")))
    filled = ((name, text.strip()) for name, text in sorted(texts.items()) if text.strip())
    return "".join(f"---\n# {name}\n{text.removeprefix('---').strip()}\n" for name, text in filled)


def golden(example: Path) -> Path:
    return HERE / "golden" / example.name


if __name__ == "__main__":
    for one in EXAMPLES:
        golden(one).write_text(render(one), encoding="utf-8")
