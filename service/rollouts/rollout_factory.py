"""Construction of a rollout from a request: validation, tokenization and groups."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coppice.wire.columns.kv_version_spans import KeepKv
from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import WeightsConstraint
from engine.protocol.generation import Generation
from service.adapters.manager import AdapterManager
from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.registry import new_rollout_id
from service.config.limits import LimitsSettings
from service.rollouts import validation
from service.rollouts.groups import logprob_tables, supports
from service.rollouts.groups.factory import GroupFactory
from service.rollouts.groups.suspended_group import can_move
from service.rollouts.kept_kv import rollout_chain
from service.rollouts.request import NewRollout, Resolved
from service.rollouts.rollout import Rollout
from service.rollouts.sampling import check_sampling
from service.rollouts.tokenizer import Tokenizer
from service.weights_versions import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A valid request's prompts and the samples that it continues, by group, with their sizes.

    `multimodal_inputs` are those of the messages with images, by group.
    """

    prompts: list[list[int]]
    multimodal_inputs: Mapping[int, Any]
    continued: Mapping[int, Sequence[TokenLists]]
    num_samples: int
    num_tokens: int
    support_bytes: int


class RolloutFactory:
    """Checks requests and creates their rollouts, without starting them."""

    def __init__(
        self,
        engine: Generation,
        versions: Versions,
        tokenizer: Tokenizer,
        adapters: AdapterManager,
        groups: GroupFactory,
        limits: LimitsSettings,
        *,
        replica_id: str,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._groups = groups
        self._limits = limits
        self._replica_id = replica_id

    async def prepare(self, request: NewRollout, *, detached: bool, is_blocking: bool) -> Prepared:
        """Check a request and tokenize its prompts."""
        num_samples = validation.check(request, is_blocking=is_blocking)
        self.check_kept_kv(request.keep_kv, request.weights)
        await check_sampling(self._engine, request.sampling)
        encoded = await self._tokenizer.prompts([group.prompt for group in request.groups])
        prompts = [prompt.token_ids for prompt in encoded]
        logprob_tables.check_rollout(request, prompts, num_samples, self._engine.info)
        support_bytes = self.support_bytes(request, prompts, detached=detached)
        return Prepared(
            prompts=prompts,
            multimodal_inputs={
                index: prompt.multimodal_input
                for index, prompt in enumerate(encoded)
                if prompt.multimodal_input is not None
            },
            continued=await validation.check_continue_from(request, prompts, self._engine.info),
            num_samples=num_samples,
            num_tokens=_num_tokens(request, prompts),
            support_bytes=support_bytes,
        )

    async def create(
        self,
        request: NewRollout,
        prepared: Prepared,
        wait_gate_open: Callable[[], Awaitable[None]],
        *,
        detached: bool,
        claim: IdempotencyClaim | None,
    ) -> Rollout:
        """Create a rollout; repeat if the weights version or the adapter has changed.

        There is no await after the last comparison.
        """
        rollout_id, keep, chain = new_rollout_id(self._replica_id), request.keep_kv, request.chain
        if keep is not None:
            chain = rollout_chain(request.owner, keep, keep.chain or rollout_id)
        request = _with_images(request, prepared.multimodal_inputs)
        prompts, continued = prepared.prompts, prepared.continued
        while True:
            await wait_gate_open()
            resolved = self.resolve(request.weights, request.adapter)
            groups = await self._groups.groups(request, prompts, resolved, continued, chain)
            await wait_gate_open()
            if self.resolve(request.weights, request.adapter) == resolved:
                break
        is_movable = can_move(request)
        return Rollout(
            rollout_id,
            groups,
            detached=detached,
            claims=() if claim is None else (claim,),
            can_move=is_movable,
            request=request.body if is_movable else None,
            observer=request.observer,
        )

    def resolve(self, weights: WeightsConstraint | None, adapter: str | None) -> Resolved:
        """Exact weights version, if required, and adapter version of a rollout that starts now."""
        return Resolved(self._versions.admit(weights), self._adapters.resolve(adapter))

    def support_bytes(
        self, request: NewRollout, prompts: list[list[int]], *, detached: bool = True
    ) -> int:
        """Upper bound of the memory of a request's supports, in bytes; raises InvalidRequest."""
        return supports.check(
            request,
            prompts,
            self._engine.info,
            max_bytes=self._limits.max_support_bytes,
            max_kept_bytes=self._limits.keep_answers_bytes if detached else None,
        )

    def check_kept_kv(self, keep: KeepKv | None, weights: WeightsConstraint | None) -> None:
        """Refuse an option to keep KV across weights updates that cannot be met."""
        validation.check_kept_kv(keep, weights, self._engine.info)


def _with_images(request: NewRollout, inputs: Mapping[int, Any]) -> NewRollout:
    if not inputs:
        return request
    groups = [
        replace(group, multimodal_input=inputs.get(index, group.multimodal_input))
        for index, group in enumerate(request.groups)
    ]
    return replace(request, groups=groups)


def _num_tokens(request: NewRollout, prompts: list[list[int]]) -> int:
    """Tokens of the prompts, and of the samples to resume."""
    continued = () if request.continue_from is None else request.continue_from.samples
    return sum(map(len, prompts)) + sum(len(sample.token_ids) for sample in continued)
