"""Receiving side of a move: a rollout of another replica continues here."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from coppice.wire.moves import MovedRollout
from engine.protocol.generation import Generation
from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.idempotency_keys import IdempotencyKeys
from service.cluster.membership import ClusterMembership
from service.errors import (
    IdempotencyInProgress,
    IdempotencyMismatch,
    InvalidRequest,
    NotReady,
    RolloutNotFound,
    VersionConflict,
)
from service.moves.cancelled_moves import CancelledMoves
from service.moves.group_state import (
    check_group,
    check_groups,
    continued,
    num_prompt_tokens_of,
    results_of,
)
from service.moves.state import claims_of
from service.rollouts import validation
from service.rollouts.admission import Admission, Reservation
from service.rollouts.fairness import TimeSlice
from service.rollouts.group import Group
from service.rollouts.group_factory import GroupFactory
from service.rollouts.manager import RolloutManager
from service.rollouts.record_reader import SampleKey
from service.rollouts.request import NewRollout, Resolved
from service.rollouts.rollout import Rollout
from service.rollouts.sampling import check_sampling
from service.rollouts.suspended_group import can_move
from service.versions import Versions
from service.weights.activation import Activation

RETRY_SECONDS = 1.0
NOTHING_LEFT = Resolved(None, None)


class MoveReceiver:
    """Continues rollouts that other replicas send, with the same ids, seeds and results.

    A refused rollout leaves nothing here: the sender tries the next replica. None is accepted
    while sampling is paused.
    """

    def __init__(
        self,
        engine: Generation,
        versions: Versions,
        admission: Admission,
        group_factory: GroupFactory,
        rollouts: RolloutManager,
        cluster: ClusterMembership,
        keys: IdempotencyKeys,
        activation: Activation,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cancelled = CancelledMoves(clock)
        self._activation = activation
        self._engine = engine
        self._versions = versions
        self._admission = admission
        self._group_factory = group_factory
        self._rollouts = rollouts
        self._cluster = cluster
        self._keys = keys
        self._arriving: set[str] = set()

    def is_arriving(self, rollout_id: str) -> bool:
        """Return True from the time a rollout is received until it is here, or refused."""
        return rollout_id in self._arriving

    async def receive(self, state: MovedRollout) -> Rollout:
        """Continue a rollout; raises a ServiceError if it cannot run here as on its source."""
        await self._cluster.check_source(state.source)
        self._check(state)
        if state.id in self._arriving:
            raise NotReady("the rollout is received already", retry_after_seconds=RETRY_SECONDS)
        self._arriving.add(state.id)
        try:
            return await self._receive(state)
        finally:
            self._arriving.discard(state.id)

    async def _receive(self, state: MovedRollout) -> Rollout:
        request = _new_rollout(state)
        reservation = self._reserve(state, request)
        try:
            resolved = self._resolve(state, request)
            rollout = await _rollout(state, await self._groups(state, request, resolved))
            rollout.claims = await self._take_over(state)
            try:
                self._check(state)
                if self._resolve(state, request) != resolved:
                    raise _other_version(state)
                self._rollouts.run(rollout, reservation)
            except BaseException:
                self._release(rollout.claims)
                raise
        except BaseException:
            self._admission.release(reservation)
            raise
        for claim in rollout.claims:
            self._keys.bind(claim, state.id)
        return rollout

    async def cancel(self, rollout_id: str) -> None:
        """Cancel a rollout whose source did not receive the response and continues it.

        No caller gets its result here. A request to continue it that arrives later is refused, too.
        A load balancer may deliver the request to the source itself, which keeps the rollout.
        """
        rollout = self._rollouts.find(rollout_id)
        if rollout is not None and rollout.is_moving:
            raise RolloutNotFound()
        self._cancelled.add(rollout_id)
        if rollout is None or rollout.source is None or rollout.moved_to is not None:
            raise RolloutNotFound()
        source = self._cluster.find(rollout.source)
        await self._rollouts.discard(rollout, None if source is None else source.url)

    def _reserve(self, state: MovedRollout, request: NewRollout | None) -> Reservation:
        num_bytes = 0
        if request is not None:
            num_bytes = self._rollouts.factory.support_bytes(request, _prompts(state, request))
        return self._admission.reserve(
            state.owner,
            samples=sum(len(group.samples) for group in state.groups),
            prompt_tokens=sum(map(num_prompt_tokens_of, state.groups)),
            support_bytes=num_bytes,
        )

    def _check(self, state: MovedRollout) -> None:
        if not self._rollouts.accepts_moves:
            raise NotReady("weights are being activated", retry_after_seconds=RETRY_SECONDS)
        if self._activation.pauses.paused:
            raise NotReady("sampling is paused", retry_after_seconds=RETRY_SECONDS)
        if state.version != self._versions.active.label:
            raise _other_version(state)
        if state.id in self._cancelled:
            raise InvalidRequest.of_parameter("id", "the source has cancelled the move")
        if self._rollouts.has(state.id):
            raise InvalidRequest.of_parameter("id", "the rollout is on this replica already")

    def _resolve(self, state: MovedRollout, request: NewRollout | None) -> Resolved:
        """Adapter and exact version as they are now; refuses an adapter that has changed."""
        if request is None:
            return NOTHING_LEFT
        if request.branching is not None or not can_move(request):
            raise InvalidRequest.of_parameter("request", "has options that cannot be moved")
        resolved = self._rollouts.factory.resolve(request.weights, request.adapter)
        if resolved.adapter != state.adapter:
            raise VersionConflict(f"the adapter here is {resolved.adapter!r}")
        return resolved

    async def _groups(
        self, state: MovedRollout, request: NewRollout | None, resolved: Resolved
    ) -> list[Group]:
        """All groups of the request; those that have not ended continue their samples."""
        info, turn = self._engine.info, TimeSlice()
        results = await asyncio.to_thread(results_of, state, info.vocab_size)
        check_groups(state, results)
        if request is None:
            return []
        validation.check(request, is_blocking=False)
        for group in state.groups:
            check_group(group, results.samples.get(group.index, []), request, info)
            await turn.pause()
        await check_sampling(self._engine, request.sampling)
        prompts = _prompts(state, request)
        groups = await self._group_factory.groups(request, prompts, resolved, {})
        for group in state.groups:
            index = group.index
            ended = results.samples.get(index, [])
            left = results.unfinished[index]
            groups[index] = continued(groups[index], group, ended, left)
            await turn.pause()
        return groups

    async def _take_over(self, state: MovedRollout) -> list[IdempotencyClaim]:
        """Take over the keys of a rollout, here and in the cluster registry.

        The caller's key stays where it is if another rollout has it: a retry has started that one
        while the registry did not respond, or had lost the key. This rollout is found by its id.
        """
        taken = list[IdempotencyClaim]()
        try:
            for claim in claims_of(state):
                if not self._claim_here(claim, state):
                    # Retries must find the rollout with this key here once the source has left.
                    await self._keys.take_from(claim.registry_key, state.source)
                    continue
                taken.append(claim)
                if claim.is_move:
                    await self._keys.take_over(claim.registry_key, state.source)
                elif not await self._keys.try_to_take_over(claim.registry_key, state.source):
                    self._keys.release(taken.pop())
        except BaseException:
            self._release(taken)
            raise
        return taken

    def _claim_here(self, claim: IdempotencyClaim, state: MovedRollout) -> bool:
        """Claim a key on this replica; False if it is a caller's key of another rollout."""
        self._keys.forget_ended(claim, state.id)
        try:
            is_free = self._keys.claim(claim) is None
        except IdempotencyMismatch:
            is_free = False
        except IdempotencyInProgress:
            message = "a request with the key of the rollout starts"
            raise NotReady(message, retry_after_seconds=RETRY_SECONDS) from None
        if claim.is_move and not is_free:
            raise InvalidRequest.of_parameter("id", "belongs to another rollout here")
        return is_free

    def _release(self, claims: Sequence[IdempotencyClaim]) -> None:
        for claim in claims:
            self._keys.release(claim)


def _other_version(state: MovedRollout) -> VersionConflict:
    return VersionConflict(f"the active weights version is not {state.version!r}")


def _new_rollout(state: MovedRollout) -> NewRollout | None:
    """Request of the groups that have not ended; None if all have."""
    if state.request is None:
        return None
    request = NewRollout.of(state.request, owner=state.owner, can_move=True)
    return replace(request, stream_tokens=state.stream_tokens)


def _prompts(state: MovedRollout, request: NewRollout) -> list[list[int]]:
    """Prompts of the groups that have not ended, by index; empty for the others."""
    moved = {group.index: group.prompt_token_ids for group in state.groups}
    return [moved.get(index, []) for index in range(len(request.groups))]


async def _num_resumed(state: MovedRollout) -> dict[SampleKey, int]:
    """Numbers of the tokens that `continue_from` gave; refuses more than a sample has."""
    given = {(each.group, each.index): each.num_tokens for each in state.given}
    samples = [(group.index, sample) for group in state.groups for sample in group.samples]
    samples += [(each.group, each.sample) for each in state.records if each.type == "sample"]
    turn = TimeSlice()
    for group, sample in samples:
        if given.get((group, sample.index), 0) > len(sample.token_ids):
            raise InvalidRequest.of_parameter("given", "a sample has fewer tokens")
        await turn.pause()
    return given


async def _rollout(state: MovedRollout, groups: list[Group]) -> Rollout:
    rollout = Rollout(
        state.id,
        groups,
        detached=state.detached,
        can_move=True,
        request=state.request,
        owner=state.owner,
    )
    moved = {group.index for group in state.groups}
    await rollout.restore(
        state.records,
        [group for group in groups if group.options.index in moved],
        num_resumed=await _num_resumed(state),
        streams_tokens=state.stream_tokens,
    )
    rollout.awaits_fetch, rollout.source = state.awaits_fetch, state.source
    return rollout
