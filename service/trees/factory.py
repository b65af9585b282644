"""Which kind of tree a request asks for."""

from coppice.wire.branching import Branching
from service.rollouts.group import GroupFields
from service.trees.external_tree import OpenTree
from service.trees.group import TreeGroup
from service.trees.plan import Plan


def tree_group(
    branching: Branching, given: GroupFields, *, block_size: int, longest_lease: float
) -> TreeGroup:
    prompt_length = len(given["prompt_token_ids"])
    plan = Plan(
        branching=branching,
        prompt_length=prompt_length,
        longest=prompt_length + given["sampling"].max_tokens,
        block_size=block_size,
    )
    if branching.mode == "external":
        return OpenTree(
            plan=plan, lease_seconds=min(branching.lease_seconds, longest_lease), **given
        )
    return TreeGroup(plan=plan, **given)
