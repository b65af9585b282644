"""Plots of trees: existence and content."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from coppice import plot_tree
from tests.client.test_surface import run
from tests.client.trees import tree

REWARDS = [1.0, 0.0, 3.0, 2.0, 4.0]


def test_plot_shows_every_leaf_with_its_end_and_its_reward(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plot_tree(tree(), REWARDS, tmp_path / "tree.svg", title="Compute 1+2.")
    axes = figure.axes[0]
    assert sorted(text.get_text() for text in axes.texts) == [f"stop  {r:.3g}" for r in range(5)]
    segments = [line for line in axes.lines if line.get_linewidth() > 2]
    assert sorted(len_of(line.get_xdata()) for line in segments) == [2, 3, 3, 4, 4, 5, 6]
    assert len(axes.collections) == 7, "a hill of entropy on each segment"
    assert ElementTree.parse(tmp_path / "tree.svg").getroot().tag.endswith("svg")


def test_plot_needs_neither_rewards_nor_entropy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plot_tree(tree(), path=tmp_path / "tree.png")
    assert len(figure.axes) == 1, "no scale of rewards"
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_names_the_package() -> None:
    done = run(
        "import sys, coppice\n"
        "sys.modules['matplotlib'] = None\n"
        "coppice.plot_tree(coppice.Tree(segments=(), leaves=()))\n"
    )
    assert done.stderr.splitlines()[-1] == (
        "ImportError: plot_tree needs matplotlib: pip install 'coppice-client[plot]'"
    )


def len_of(ends: list[float]) -> float:
    return ends[1] - ends[0]
