"""Construction of the groups of a rollout request, one per prompt."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from coppice.wire.branching import Branching
from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import Finish
from engine.protocol.generation import Generation
from engine.types.samples import KeptKv
from service.kv.prompt_source import PromptSource
from service.kv.spans.manager import KvReuseManager
from service.kv.spans.prompt_template import Scope
from service.rollouts import validation
from service.rollouts.fairness import PriorityAging, TimeSlice
from service.rollouts.groups.finish_policy import FinishPolicy
from service.rollouts.groups.flat_sampler import FlatSampler
from service.rollouts.groups.group import Group, Sampler
from service.rollouts.groups.options import TEMPLATE, GroupOptions, Parse, derive_seed
from service.rollouts.request import NewGroup, NewRollout, Resolved
from service.rollouts.sampling import limited, to_engine_sampling
from service.rollouts.tokenizer import Tokenizer, to_chat_request
from service.rollouts.trees.branching_plan import Plan
from service.rollouts.trees.external_tree import ExternalTree
from service.rollouts.trees.tree_sampler import TreeSampler


class GroupFactory:
    """Creates the groups of a request, with all their options, without starting them."""

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
        request: NewRollout,
        prompts: list[list[int]],
        resolved: Resolved,
        continued: Mapping[int, Sequence[TokenLists]],
        chain: KeptKv | None = None,
    ) -> list[Group]:
        """Create one group per prompt of a request.

        `chain` is that of the KV that the rollout keeps. `continued` are samples to resume, by the
        index of their group.
        """
        groups, turn = list[Group](), TimeSlice()
        common = self._common(request, resolved, chain)
        for index, prompt in enumerate(prompts):
            options = self._options(request, common, index, prompt)
            if index in continued:
                options = replace(options, continued=continued[index])
            groups.append(self._group(request, options, self._source(request, options)))
            await turn.pause()
        return groups

    def _source(self, request: NewRollout, options: GroupOptions) -> PromptSource:
        spans = request.groups[options.index].spans
        if spans is None:
            return PromptSource()
        return self._kv_reuse.prompt_source(
            spans,
            request.kv_reuse,
            Scope(request.owner, request.cache_salt),
            priority=options.template.priority,
            num_samples=options.n,
        )

    def _group(self, request: NewRollout, options: GroupOptions, source: PromptSource) -> Group:
        if request.branching is not None:
            sampler = self._tree_sampler(request.branching, options)
            return Group(options=options, sampler=sampler, source=source)
        finish = request.finish or Finish()
        policy = _finish_policy(finish, request.groups[options.index])
        return Group(options=options, sampler=FlatSampler(), source=source, finish_policy=policy)

    def _tree_sampler(self, branching: Branching, options: GroupOptions) -> Sampler:
        prompt_length = len(options.prompt_token_ids)
        plan = Plan(
            branching=branching,
            prompt_length=prompt_length,
            max_length=prompt_length + options.sampling.max_tokens,
            block_size=self._engine.info.block_size,
        )
        if branching.mode != "external":
            return TreeSampler(plan, options)
        lease_seconds = min(branching.lease_seconds, self._max_lease_seconds)
        return ExternalTree(plan, options, lease_seconds=lease_seconds)

    def _common(
        self, request: NewRollout, resolved: Resolved, chain: KeptKv | None
    ) -> GroupOptions:
        """Options that are the same in all groups of a rollout."""
        finish, info = request.finish or Finish(), self._engine.info
        sampling = to_engine_sampling(request.sampling, info.max_context_tokens)
        template = replace(
            TEMPLATE,
            cache_salt=request.cache_salt,
            kept_kv=chain,
            session_id=request.session_id,
            speculation=request.speculation,
            adapter=resolved.adapter,
            num_top_logprobs=request.top_logprobs or request.num_top_logprobs,
            logprob_token_ids=tuple(request.logprob_token_ids or ()),
            raw_logprobs=request.logprobs_mode == "raw_logprobs",
            support=request.return_support,
            returns_text=request.returns_text,
            returns_logprobs=request.returns_logprobs,
        )
        return GroupOptions(
            owner=request.owner,
            exact_version=resolved.exact_version,
            adapter=resolved.adapter,
            template=template,
            stream_tokens=request.stream_tokens,
            answers_top_logprobs=bool(request.top_logprobs),
            support_vocab_size=info.vocab_size if request.return_support else None,
            returns_routed_experts=bool(request.return_routed_experts),
            sampling=sampling,
            num_required=finish.num_samples,
            deadline_seconds=finish.deadline_seconds,
            echo=request.echo,
            kv_lease_seconds=None if request.kv is None else request.kv.lease_seconds,
        )

    def _options(
        self, request: NewRollout, common: GroupOptions, index: int, prompt: list[int]
    ) -> GroupOptions:
        group, room = request.groups[index], self._engine.info.max_context_tokens - len(prompt)
        # One number per group: groups of equal priority run in the order in which they arrive.
        priority = self._priority_aging.to_engine_priority(request.priority)
        return replace(
            common,
            template=replace(
                common.template, priority=priority, multimodal_input=group.multimodal_input
            ),
            id=group.id or str(index),
            index=index,
            n=validation.num_samples_of(request, group),
            prompt_token_ids=prompt,
            num_images=group.num_images,
            sampling=limited(common.sampling, room),
            seed=group.seed,
            seeds=group.seeds,
            decode=self._tokenizer.response_text if group.has_text else None,
            parse=self._parse(request, group),
        )

    def _parse(self, request: NewRollout, group: NewGroup) -> Parse | None:
        prompt = group.prompt
        if not request.return_message or isinstance(prompt, list) or prompt.messages is None:
            return None
        # Built for the first response, in the tokenizer thread, and kept for the others.
        build = functools.cache(partial(to_chat_request, prompt))
        return partial(self._tokenizer.message, build)


def _finish_policy(finish: Finish, group: NewGroup) -> FinishPolicy | None:
    if finish.num_samples is None:
        return None
    seed = None if group.seed is None else derive_seed(group.seed, "finish")
    return FinishPolicy(finish.select, num_required=finish.num_samples, n=group.n, seed=seed)
