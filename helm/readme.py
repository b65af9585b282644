"""Generator of the chart's README, with a table of values.yaml. Run `python -m helm.readme`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "coppice"
FILE = CHART / "README.md"
HEAD = """# The Coppice chart

A release of this chart serves one model with one configuration on any number of replicas. Install
a release for each model.

    coppice new-key trainer --roles rollout,admin > keys.yaml
    kubectl create secret generic coppice-keys --from-file=keys.yaml
    helm install coppice helm/coppice --set auth.existingSecret=coppice-keys \\
        --set image.repository=REGISTRY/coppice

`helm/examples/` has values for a CPU, for an 8B model on two GPUs and for a cluster of three
replicas. `helm/golden/` has the manifests that the chart renders from them. The documentation
describes [a first installation](../../docs/start/kubernetes.md),
[sizing](../../docs/operate/sizing.md), [upgrades](../../docs/operate/upgrade.md) and
[replicas that share a registry](../../docs/operate/cluster.md).

The server's settings in the sections `engine`, `attention`, `speculation`, `graphs`, `kv`,
`limits`, `sessions`, `weights`, `cluster`, `log` and `trace` are values of the
same names ([settings](../../docs/reference/settings.md)). Rendering fails, and names the reason, if
the server would reject a setting at startup or if values contradict each other.

| value | default | meaning |
|---|---|---|
"""
_KEY = re.compile(r"^( *)([A-Za-z_]+):")


def documented_values() -> Iterator[tuple[str, str]]:
    """Comments of values by dotted path."""
    path: list[str] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("# "):
            comment.append(line.strip().removeprefix("# "))
        elif found := _KEY.match(line):
            path = [*path[: len(found[1]) // 2], found[2]]
            if comment:
                yield ".".join(path), " ".join(comment)
            comment = []


def default(path: str) -> Any:
    node = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for name in path.split("."):
        node = node[name]
    return node


def _format_value(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return f"`{text.removesuffix('...').strip()}`"


def render() -> str:
    rows = (
        f"| `{path}` | {_format_value(default(path))} | {text} |\n"
        for path, text in documented_values()
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
