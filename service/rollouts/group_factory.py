"""From a request to its groups: each with its prompt, its sampling, its rank and its rules."""

from dataclasses import dataclass

from coppice.wire.rollouts import Finish, RolloutRequest
from engine.protocol import Engine, Sampling
from service.kv_reuse.group_factory import Segments
from service.rollouts import validation
from service.rollouts.group import Group, GroupFields
from service.rollouts.priority import Ranks
from service.rollouts.resume import Started, started_of
from service.rollouts.time_slice import TimeSlice
from service.rollouts.tokenizer import Prompts
from service.trees.factory import tree_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """What other servers' clients may ask for and our own contract does not have."""

    cache_salt: str | None = None
    num_likeliest: int = 0


NOTHING_ASIDE = Aside()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all groups of a rollout have in common, beside what it asks for."""

    owner: str
    exact_version: str | None
    adapter: str | None
    aside: Aside


class Grouping:
    """Makes groups; starts none."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        ranks: Ranks,
        segments: Segments,
        *,
        longest_lease: float,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._ranks = ranks
        self._segments = segments
        self._longest_lease = longest_lease

    async def groups(
        self, request: RolloutRequest, prompts: list[list[int]], terms: Terms
    ) -> list[Group]:
        groups, started, turn = list[Group](), started_of(request), TimeSlice()
        for index, prompt in enumerate(prompts):
            fields = self._segments.settle(request, self._fields(request, index, prompt, terms))
            groups.append(self._group(request, fields, started.get(index, [])))
            await turn.pause()
        return groups

    def _group(self, request: RolloutRequest, given: GroupFields, started: Started) -> Group:
        index = given["index"]
        if request.branching is None:
            rule = validation.rule_of(request.finish or Finish(), request.groups[index])
            chained = self._segments.chained(request, given, rule=rule)
            return chained or Group(rule=rule, started=started, **given)
        return tree_group(
            request.branching,
            given,
            block_size=self._engine.facts.block_size,
            longest_lease=self._longest_lease,
        )

    def _fields(
        self, request: RolloutRequest, index: int, prompt: list[int], terms: Terms
    ) -> GroupFields:
        group, finish = request.groups[index], request.finish or Finish()
        return {
            "id": group.id or str(index),
            "index": index,
            "n": validation.num_samples_of(request, group),
            "prompt_token_ids": prompt,
            "sampling": self._sampling(request, len(prompt)),
            "seed": group.seed,
            "enough": finish.samples,
            "deadline_seconds": finish.deadline_seconds,
            "priority": self._ranks.rank(request.priority),
            "speculation": request.speculation,
            "exact_version": terms.exact_version,
            "owner": terms.owner,
            "cache_salt": terms.aside.cache_salt,
            "adapter": terms.adapter,
            "num_likeliest": terms.aside.num_likeliest,
            "kv_lease_seconds": None if request.kv is None else request.kv.lease_seconds,
            "decode": self._prompts.text if group.prompt.text or group.prompt.messages else None,
            "reuse": None,
        }

    def _sampling(self, request: RolloutRequest, num_prompt_tokens: int) -> Sampling:
        room = self._engine.facts.max_context_tokens - num_prompt_tokens
        wanted = request.sampling
        return Sampling(
            max_tokens=min(wanted.max_tokens or room, room),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            stop_token_ids=tuple(wanted.stop_token_ids),
            ignore_eos=wanted.ignore_eos,
        )
