"""Construction of the groups (one per prompt) of a rollout request."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from coppice.wire.branching import Branching
from coppice.wire.columns import TokenLists
from coppice.wire.rollouts import Finish, GroupRequest, RolloutRequest
from engine.protocol.generation import Generation
from service.kv_reuse.manager import KvReuseManager
from service.kv_reuse.prompt_sections import Scope
from service.prompt_kv.prompt_source import PrefilledPrompt, PromptSource
from service.rollouts import validation
from service.rollouts.fairness import PriorityAging, TimeSlice
from service.rollouts.finish_policy import FinishPolicy
from service.rollouts.group import Group
from service.rollouts.group_options import GroupOptions, Parse, derive_seed
from service.rollouts.sampling import limited, to_engine_sampling
from service.rollouts.tokenizer import Tokenizer, to_chat_request
from service.rollouts.trees.external_tree import ExternalTree
from service.rollouts.trees.plan import Plan
from service.rollouts.trees.tree_group import TreeGroup


class GroupFactory:
    """Creates the groups of a rollout request, with all their options, without starting them."""

    def __init__(
        self,
        engine: Generation,
        tokenizer: Tokenizer,
        priority_aging: PriorityAging,
        kv_reuse: KvReuseManager,
        *,
        max_lease_seconds: float,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._priority_aging = priority_aging
        self._kv_reuse = kv_reuse
        self._max_lease_seconds = max_lease_seconds

    async def groups(
        self,
        request: RolloutRequest,
        prompts: list[list[int]],
        shared: GroupOptions,
        continued: Mapping[int, Sequence[TokenLists]],
    ) -> list[Group]:
        """Create one group per prompt of a request; `shared` are the options of all groups.

        `continued` are samples to resume, by the index of their group.
        """
        groups, turn = list[Group](), TimeSlice()
        sampling = to_engine_sampling(request.sampling, self._engine.info.max_context_tokens)
        given = tuple(request.logprob_token_ids or ())
        shared = replace(shared, sampling=sampling, logprob_token_ids=given)
        for index, prompt in enumerate(prompts):
            options = self._options(request, index, prompt, continued.get(index, ()), shared)
            source: PromptSource = PrefilledPrompt()
            if request.groups[index].prompt.spans is not None:
                source = self._kv_reuse.prompt_source(
                    request,
                    options.index,
                    Scope(options.owner, options.cache_salt),
                    priority=options.priority,
                    num_samples=options.n,
                )
            groups.append(self._group(request, options, source))
            await turn.pause()
        return groups

    def _group(self, request: RolloutRequest, options: GroupOptions, source: PromptSource) -> Group:
        if request.branching is not None:
            return create_tree_group(
                request.branching,
                options,
                source,
                block_size=self._engine.info.block_size,
                max_lease_seconds=self._max_lease_seconds,
            )
        finish = request.finish or Finish()
        policy = _finish_policy(finish, request.groups[options.index])
        return Group(options=options, source=source, finish_policy=policy)

    def _options(
        self,
        request: RolloutRequest,
        index: int,
        prompt: list[int],
        continued: Sequence[TokenLists],
        shared: GroupOptions,
    ) -> GroupOptions:
        group, finish = request.groups[index], request.finish or Finish()
        return replace(
            shared,
            id=group.id or str(index),
            index=index,
            n=validation.num_samples_of(request, group),
            prompt_token_ids=prompt,
            sampling=limited(shared.sampling, self._engine.info.max_context_tokens - len(prompt)),
            seed=group.seed,
            seeds=group.seeds,
            num_required=finish.num_samples,
            deadline_seconds=finish.deadline_seconds,
            priority=self._priority_aging.to_engine_priority(request.priority),
            speculation=request.speculation,
            support_vocab_size=self._engine.info.vocab_size if request.return_support else None,
            kv_lease_seconds=None if request.kv is None else request.kv.lease_seconds,
            decode=self._tokenizer.response_text if _has_text(group) else None,
            parse=self._parse(request, group),
            echo=request.echo,
            continued=continued,
            num_top_logprobs=request.top_logprobs or shared.num_top_logprobs,
            answers_top_logprobs=bool(request.top_logprobs),
            raw_logprobs=request.logprobs_mode == "raw_logprobs",
            returns_routed_experts=bool(request.return_routed_experts),
        )

    def _parse(self, request: RolloutRequest, group: GroupRequest) -> Parse | None:
        if not request.return_message or group.prompt.messages is None:
            return None
        # Built for the first response, in the tokenizer thread, and kept for the others.
        build = functools.cache(partial(to_chat_request, group.prompt))
        return partial(self._tokenizer.message, build)


def _has_text(group: GroupRequest) -> bool:
    """True if samples of the group are returned with their text."""
    return group.prompt.text is not None or group.prompt.messages is not None


def create_tree_group(
    branching: Branching,
    options: GroupOptions,
    source: PromptSource,
    *,
    block_size: int,
    max_lease_seconds: float,
) -> TreeGroup:
    prompt_length = len(options.prompt_token_ids)
    plan = Plan(
        branching=branching,
        prompt_length=prompt_length,
        max_length=prompt_length + options.sampling.max_tokens,
        block_size=block_size,
    )
    if branching.mode != "external":
        return TreeGroup(options=options, source=source, plan=plan)
    lease_seconds = min(branching.lease_seconds, max_lease_seconds)
    return ExternalTree(options=options, source=source, plan=plan, lease_seconds=lease_seconds)


def _finish_policy(finish: Finish, group: GroupRequest) -> FinishPolicy | None:
    if finish.num_samples is None:
        return None
    seed = None if group.seed is None else derive_seed(group.seed, "finish")
    return FinishPolicy(finish.select, num_required=finish.num_samples, n=group.n, seed=seed)
