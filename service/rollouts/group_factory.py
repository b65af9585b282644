"""Construction of a request's groups: prompt, sampling parameters, priority and finish policy."""

from dataclasses import dataclass

from coppice.wire.rollouts import Finish, RolloutRequest
from engine.protocol import Engine
from engine.types import Sampling
from service.kv_reuse.manager import KvReuse
from service.rollouts import validation
from service.rollouts.group import Group, GroupOptions
from service.rollouts.resume import ContinuedSamples, samples_to_continue
from service.rollouts.scheduling import PriorityAging, TimeSlice
from service.rollouts.tokenizer import Tokenizer
from service.trees.factory import create_tree_group


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatOptions:
    """Options of compatibility routes that the native API does not have."""

    cache_salt: str | None = None
    num_top_logprobs: int = 0


NO_COMPAT_OPTIONS = CompatOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """Options common to all groups of a rollout that are not part of the request."""

    owner: str
    exact_version: str | None
    adapter: str | None
    compat_options: CompatOptions


class GroupFactory:
    """Creates groups without starting them."""

    def __init__(
        self,
        engine: Engine,
        prompts: Tokenizer,
        priority_aging: PriorityAging,
        kv_reuse: KvReuse,
        *,
        max_lease_seconds: float,
    ) -> None:
        self._engine = engine
        self._tokenizer = prompts
        self._priority_aging = priority_aging
        self._kv_reuse = kv_reuse
        self._max_lease_seconds = max_lease_seconds

    async def groups(
        self, request: RolloutRequest, prompts: list[list[int]], shared: SharedOptions
    ) -> list[Group]:
        groups, continued, turn = list[Group](), samples_to_continue(request), TimeSlice()
        for index, prompt in enumerate(prompts):
            fields = self._kv_reuse.plan_order(
                request, self._group_options(request, index, prompt, shared)
            )
            groups.append(self._group(request, fields, continued.get(index, [])))
            await turn.pause()
        return groups

    def _group(
        self, request: RolloutRequest, options: GroupOptions, continued: ContinuedSamples
    ) -> Group:
        index = options["index"]
        if request.branching is None:
            finish_policy = validation.create_finish_policy(
                request.finish or Finish(), request.groups[index]
            )
            kv_reuse_group = self._kv_reuse.kv_reuse_group(
                request, options, finish_policy=finish_policy
            )
            return kv_reuse_group or Group(
                finish_policy=finish_policy, continued=continued, **options
            )
        return create_tree_group(
            request.branching,
            options,
            block_size=self._engine.info.block_size,
            max_lease_seconds=self._max_lease_seconds,
        )

    def _group_options(
        self, request: RolloutRequest, index: int, prompt: list[int], shared: SharedOptions
    ) -> GroupOptions:
        group, finish = request.groups[index], request.finish or Finish()
        return {
            "id": group.id or str(index),
            "index": index,
            "n": validation.num_samples_of(request, group),
            "prompt_token_ids": prompt,
            "sampling": self._sampling(request, len(prompt)),
            "seed": group.seed,
            "num_required": finish.samples,
            "deadline_seconds": finish.deadline_seconds,
            "priority": self._priority_aging.to_engine_priority(request.priority),
            "speculation": request.speculation,
            "exact_version": shared.exact_version,
            "owner": shared.owner,
            "cache_salt": shared.compat_options.cache_salt,
            "adapter": shared.adapter,
            "num_top_logprobs": shared.compat_options.num_top_logprobs,
            "kv_lease_seconds": None if request.kv is None else request.kv.lease_seconds,
            "decode": self._tokenizer.text if group.prompt.text or group.prompt.messages else None,
            "reuse": None,
        }

    def _sampling(self, request: RolloutRequest, num_prompt_tokens: int) -> Sampling:
        room = self._engine.info.max_context_tokens - num_prompt_tokens
        wanted = request.sampling
        return Sampling(
            max_tokens=min(wanted.max_tokens or room, room),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            stop_token_ids=tuple(wanted.stop_token_ids),
            ignore_eos=wanted.ignore_eos,
        )
