"""Continuation of a suspended tree: a new group with the segments and paths of the old one.

Each path goes on after its last token, with the same seed. If the same weights are
active, the tree has the segments that it would have without the suspension, with two exceptions.
vLLM's first model runner on a GPU gives seeded paths with tokens another seed. And where
`max_new_tokens_total` ends paths, the order in which paths end decides about the others.
"""

import uuid
from dataclasses import replace

from service.rollouts.prompt_kv_source import PrefilledPrompt
from service.trees.path_request import Budget
from service.trees.tree_group import TreeGroup


def resumed_tree(group: TreeGroup) -> TreeGroup:
    """Group that continues the suspended paths of `group`, which has ended."""
    paths = [replace(path, id=uuid.uuid4().hex) for path in group.suspended_paths]
    resumed = TreeGroup(
        options=group.options,
        source=PrefilledPrompt(),
        plan=group.plan,
        name=group.name,
        turns=group.turns,
        num_done=group.num_done,
        num_complete=group.num_complete,
        was_truncated=group.was_truncated,
        cached_tokens=group.cached_tokens,
        seconds_used=group.seconds_used,
        seconds_before=group.elapsed_seconds,
        sample_seconds=group.sample_seconds,
        num_children=group.num_children,
        continued_paths=paths,
    )
    max_tokens = group.plan.branching.max_new_tokens_total
    resumed.tree = group.tree
    resumed.budget = Budget.restored(max_tokens, paths, used=group.tree.num_tokens)
    return resumed
