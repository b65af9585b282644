"""Factory of tree groups."""

from coppice.wire.branching import Branching
from service.rollouts.group import GroupOptions
from service.trees.external_tree import ExternalTree
from service.trees.group import TreeGroup
from service.trees.plan import Plan


def create_tree_group(
    branching: Branching, options: GroupOptions, *, block_size: int, max_lease_seconds: float
) -> TreeGroup:
    prompt_length = len(options["prompt_token_ids"])
    plan = Plan(
        branching=branching,
        prompt_length=prompt_length,
        max_length=prompt_length + options["sampling"].max_tokens,
        block_size=block_size,
    )
    if branching.mode == "external":
        return ExternalTree(
            plan=plan, lease_seconds=min(branching.lease_seconds, max_lease_seconds), **options
        )
    return TreeGroup(plan=plan, **options)
