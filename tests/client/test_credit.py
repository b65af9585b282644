"""Advantages of tree segments against the papers' formulas, computed by hand."""

import math

import numpy as np
import pytest

from coppice import (
    effective_leaves,
    pruned_by_depth,
    pruned_by_width,
    segment_advantages,
    segment_rewards,
    segment_weights,
)
from coppice.credit import Scheme
from tests.client.trees import LEAVES, tree

REWARDS = [1.0, 0.0, 3.0, 2.0, 4.0]


def test_segment_reward_is_the_mean_of_its_leaves() -> None:
    fused = segment_rewards(tree(), REWARDS)
    assert fused == pytest.approx(
        {"a1": 1, "a2": 0, "b1": 3, "b2": 2, "b3": 4, "a": 0.5, "b": 3, None: 2}
    )


def test_fusion_may_weight_children_by_probability() -> None:
    grown = tree()
    fused = segment_rewards(grown, REWARDS, fusion="probability")
    odds = [math.exp(float(grown.segment(name).logprobs.sum())) for name in ("a1", "a2")]
    assert fused["a"] == pytest.approx(odds[0] / sum(odds))
    assert fused["b"] not in (3.0, fused["a"])


def test_depthwise_normalizes_among_segments_of_a_depth() -> None:
    found = segment_advantages(tree(), REWARDS, "depthwise")
    assert [found["a"], found["b"]] == pytest.approx([-1, 1], abs=1e-6)
    leaves = np.array([found[leaf] for leaf in LEAVES])
    assert leaves.mean() == pytest.approx(0, abs=1e-6)
    assert leaves.std() == pytest.approx(1, abs=1e-6)


def test_depthwise_is_zero_without_siblings_to_compare() -> None:
    alone = tree({"a": (None, 3), "b": ("a", 2), "c": ("a", 2)}, ("b", "c"))
    assert segment_advantages(alone, [1.0, 1.0], "depthwise") == {"a": 0, "b": 0, "c": 0}


def test_parent_delta_is_the_gain_over_the_parent() -> None:
    found = segment_advantages(tree(), REWARDS, "parent_delta")
    assert found == pytest.approx(
        {"a": -1.5, "b": 1, "a1": 0.5, "a2": -0.5, "b1": 0, "b2": -1, "b3": 1}
    )


def test_ancestor_mean_compares_a_leaf_with_all_its_groups() -> None:
    found = segment_advantages(tree(), REWARDS, "ancestor_mean")
    assert found["a1"] == pytest.approx(((1 - 2) + (1 - 0.5)) / 2)
    assert found["b3"] == pytest.approx(((4 - 2) + (4 - 3)) / 2)
    assert found["a"] == pytest.approx((found["a1"] + found["a2"]) / 2)


def test_ancestor_of_one_leaf_is_not_a_group() -> None:
    chain = tree({"a": (None, 3), "b": ("a", 2), "c": (None, 2)}, ("b", "c"))
    assert segment_advantages(chain, [1.0, 0.0], "ancestor_mean")["b"] == pytest.approx(0.5)


def test_leaf_grpo_gives_a_segment_the_mean_of_its_leaves() -> None:
    found = segment_advantages(tree(), REWARDS, "leaf_grpo")
    plain = (np.array(REWARDS) - 2) / (np.std(REWARDS, ddof=1) + 1e-6)
    assert [found[leaf] for leaf in LEAVES] == pytest.approx(plain.tolist())
    assert found["b"] == pytest.approx(plain[2:].mean())


def test_weights_count_a_segment_once_or_by_its_leaves() -> None:
    grown = tree()
    assert set(segment_weights(grown, "once").values()) == {1.0}
    assert segment_weights(grown, "per_leaf")["b"] == 3
    assert segment_weights(grown, "sqrt")["b"] == pytest.approx(math.sqrt(3))


def test_leaves_with_long_shared_prefixes_count_less() -> None:
    apart = tree({"a": (None, 4), "b": (None, 4)}, ("a", "b"))
    assert effective_leaves(apart) == pytest.approx(2)
    shared = tree({"s": (None, 96), "a": ("s", 4), "b": ("s", 4)}, ("a", "b"))
    assert effective_leaves(shared) == pytest.approx(4 / (2 + 2 * 0.96))
    assert 1 < effective_leaves(tree()) < 5


def test_pruning_by_depth_drops_whole_depths() -> None:
    assert pruned_by_depth(tree(), {1}) == set(LEAVES)


def test_pruning_by_width_keeps_the_better_half_or_the_extremes() -> None:
    assert pruned_by_width(tree(), REWARDS, "best_half") == {"a", "b", "a1", "b1", "b3"}
    assert pruned_by_width(tree(), REWARDS, "extremes") == {"a", "b", "a2", "b3"}


def test_advantage_can_be_clipped() -> None:
    found = segment_advantages(tree(), [0.0, 0.0, 0.0, 0.0, 100.0], "parent_delta", clip=5.0)
    assert max(map(abs, found.values())) == 5.0


def test_number_of_rewards_must_match_the_leaves() -> None:
    schemes: list[Scheme] = ["depthwise", "parent_delta", "ancestor_mean", "leaf_grpo"]
    for scheme in schemes:
        with pytest.raises(ValueError, match="3 rewards for 5 leaves"):
            segment_advantages(tree(), [1.0, 2.0, 3.0], scheme)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown scheme: best"):
        segment_advantages(tree(), REWARDS, "best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown fusion: sum"):
        segment_rewards(tree(), REWARDS, fusion="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown weighting: all"):
        segment_weights(tree(), "all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown width: both"):
        pruned_by_width(tree(), REWARDS, "both")  # type: ignore[arg-type]
