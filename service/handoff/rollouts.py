"""Rollouts in a hand-over: suspends and offers local ones, restores received ones."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from coppice.wire.handoff import RolloutOffer, RolloutState
from engine.protocol.generation import Generation
from service.cluster.build import Cluster
from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.registry import Replica
from service.errors import (
    IdempotencyInProgress,
    IdempotencyMismatch,
    InvalidRequest,
    NotReady,
    RolloutNotFound,
    VersionConflict,
)
from service.handoff.receiver import RETRY_SECONDS
from service.handoff.rollout_state import (
    check_group,
    claim_of,
    continued,
    estimated_bytes,
    given_tokens,
    restored_tokens,
    state_of,
)
from service.handoff.sender import Offer
from service.rollouts import validation
from service.rollouts.admission import Reservation
from service.rollouts.build import Rollouts
from service.rollouts.fairness import TimeSlice
from service.rollouts.groups import logprob_tables
from service.rollouts.groups.group import Group
from service.rollouts.groups.suspended_group import can_move
from service.rollouts.request import NewRollout, Resolved
from service.rollouts.rollout import Rollout
from service.rollouts.sampling import check_sampling
from service.weights.activation import Activation
from service.weights_versions import Versions

NOTHING_LEFT = Resolved(None, None)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutArrival:
    """Rollout that was restored from an offer, and does not run yet."""

    offer: RolloutOffer
    request: NewRollout | None
    resolved: Resolved
    rollout: Rollout
    reservation: Reservation
    claims: list[IdempotencyClaim]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutHandoff:
    """Offers of rollouts to replicas with the same active weights version, and their arrival here.

    A rollout goes on with the same id, seeds and results. None is accepted while sampling is
    paused.
    """

    engine: Generation
    versions: Versions
    rollouts: Rollouts
    cluster: Cluster
    activation: Activation
    candidates: Callable[[str | None], list[Replica]]

    @property
    def replicas(self) -> list[Replica]:
        return self.candidates(self.versions.active.label)

    @contextmanager
    def offered(self, rollout: Rollout) -> Iterator[Offer]:
        """Context manager around the offer of a rollout that does not run.

        `moved_to` is set as soon as a replica has accepted it: a timeout, or an error while the
        connection is closed, must not continue it here, too.
        """

        async def state() -> RolloutOffer:
            found = await state_of(rollout, version=self.versions.active.label)
            return RolloutOffer(**dict(found), source=self.cluster.membership.own_id)

        def on_accepted(replica: Replica) -> None:
            rollout.moved_to = replica.url

        own = IdempotencyClaim.of_move(rollout.owner, rollout.id)
        rollout.is_moving = True
        try:
            yield Offer(
                id=rollout.id,
                state=state,
                keys=[*{claim.registry_key for claim in (*rollout.claims, own)}],
                replicas=self.replicas,
                on_accepted=on_accepted,
                is_wanted=lambda: rollout.is_suspended,
            )
        finally:
            rollout.is_moving = False

    def ids(self, offer: RolloutOffer) -> list[str]:
        return [offer.id]

    def check(self, offer: RolloutOffer) -> None:
        if not self.rollouts.manager.accepts_moves:
            raise NotReady("weights are being activated", retry_after_seconds=RETRY_SECONDS)
        if self.activation.pauses.paused:
            raise NotReady("sampling is paused", retry_after_seconds=RETRY_SECONDS)
        if offer.version != self.versions.active.label:
            raise _other_version(offer)
        if self.rollouts.manager.has(offer.id):
            raise InvalidRequest.of_parameter("id", "the rollout is on this replica already")

    @asynccontextmanager
    async def prepared(self, offer: RolloutOffer) -> AsyncIterator[RolloutArrival]:
        request = _new_rollout(offer)
        reservation, claims = self._reserve(offer, request), list[IdempotencyClaim]()
        try:
            resolved = self._resolve(offer, request)
            rollout = await self._rollout(offer, await self._groups(offer, request, resolved))
            rollout.claims = claims
            yield RolloutArrival(offer, request, resolved, rollout, reservation, claims)
        except BaseException:
            for claim in claims:
                self.cluster.idempotency_keys.release(claim)
            self.rollouts.admission.release(reservation)
            raise

    async def take_over_keys(self, arrival: RolloutArrival) -> None:
        """Take over the keys of a rollout: that of its id, and the caller's if there is one.

        The caller's key stays where it is if another rollout has it: a retry has started that one
        while the registry did not respond, or had lost the key. This rollout is found by its id.
        """
        offer, taken, keys = arrival.offer, arrival.claims, self.cluster.idempotency_keys
        own, caller = IdempotencyClaim.of_move(offer.owner, offer.id), claim_of(offer, offer.key)
        if not self._claim_here(own, offer.id):
            raise InvalidRequest.of_parameter("id", "belongs to another rollout here")
        taken.append(own)
        await keys.take_over(own.registry_key, offer.source)
        if caller is None:
            return
        if not self._claim_here(caller, offer.id):
            # Retries must find the rollout with this key here once the source has left.
            await keys.take_from(caller.registry_key, offer.source)
            return
        taken.append(caller)
        if not await keys.try_to_take_over(caller.registry_key, offer.source):
            keys.release(taken.pop())

    def _claim_here(self, claim: IdempotencyClaim, rollout_id: str) -> bool:
        """Claim a key on this replica; False if another rollout here has it."""
        keys = self.cluster.idempotency_keys
        keys.forget_ended(claim, rollout_id)
        try:
            return keys.claim(claim) is None
        except IdempotencyMismatch:
            return False
        except IdempotencyInProgress:
            message = "a request with the key of the rollout starts"
            raise NotReady(message, retry_after_seconds=RETRY_SECONDS) from None

    def add(self, arrival: RolloutArrival) -> None:
        if self._resolve(arrival.offer, arrival.request) != arrival.resolved:
            raise _other_version(arrival.offer)
        self.rollouts.manager.run(arrival.rollout, arrival.reservation)
        for claim in arrival.claims:
            self.cluster.idempotency_keys.bind(claim, arrival.rollout.id)

    def is_offered(self, rollout_id: str) -> bool:
        rollout = self.rollouts.manager.find(rollout_id)
        return rollout is not None and rollout.is_moving

    async def give_back(self, rollout_id: str) -> None:
        """Drop the copy of a rollout that its source continues. No caller gets its result here."""
        rollout = self.rollouts.manager.find(rollout_id)
        if rollout is None or rollout.source is None or rollout.moved_to or rollout.is_moving:
            raise RolloutNotFound()
        source = self.cluster.membership.find(rollout.source)
        await self.rollouts.manager.discard(rollout, None if source is None else source.url)

    def _reserve(self, state: RolloutState, request: NewRollout | None) -> Reservation:
        num_bytes = 0
        if request is not None:
            factory = self.rollouts.manager.factory
            num_bytes = factory.support_bytes(request, _prompts(state, request))
        samples = [sample for group in state.groups for sample in group.samples]
        return self.rollouts.admission.reserve(
            state.owner,
            samples=len(samples),
            prompt_tokens=sum(len(group.prompt_token_ids) for group in state.groups)
            + sum(len(sample.token_ids) for sample in samples),
            support_bytes=num_bytes,
        )

    def _resolve(self, state: RolloutState, request: NewRollout | None) -> Resolved:
        """Adapter and exact version as they are now; refuses an adapter that has changed."""
        if request is None:
            return NOTHING_LEFT
        if request.branching is not None or not can_move(request):
            raise InvalidRequest.of_parameter("request", "has options that have no state")
        resolved = self.rollouts.manager.factory.resolve(request.weights, request.adapter)
        if resolved.adapter != state.adapter:
            raise VersionConflict(f"the adapter here is {resolved.adapter!r}")
        return resolved

    async def _groups(
        self, state: RolloutState, request: NewRollout | None, resolved: Resolved
    ) -> list[Group]:
        """All groups of the request; those that have not ended continue their samples."""
        info, turn = self.engine.info, TimeSlice()
        tokens = await asyncio.to_thread(restored_tokens, state, info.vocab_size)
        if request is None:
            return []
        num_samples = validation.check(request, is_blocking=False)
        for group in state.groups:
            check_group(group, tokens.samples.get(group.index, []), request, info)
            await turn.pause()
        await check_sampling(self.engine, request.sampling)
        prompts = _prompts(state, request)
        logprob_tables.check_rollout(request, [*filter(None, prompts)], num_samples, info)
        groups = await self.rollouts.group_factory.groups(request, prompts, resolved, {})
        given = given_tokens(state)
        for group in state.groups:
            groups[group.index] = continued(groups[group.index], group, tokens, given)
            await turn.pause()
        return groups

    async def _rollout(self, offer: RolloutOffer, groups: list[Group]) -> Rollout:
        rollout = Rollout(
            offer.id,
            groups,
            detached=offer.detached,
            can_move=True,
            request=offer.request,
            owner=offer.owner,
        )
        unfinished = {group.index for group in offer.groups}
        await rollout.restore(
            offer.records,
            [group for group in groups if group.options.index in unfinished],
            num_resumed=given_tokens(offer),
            streams_tokens=offer.stream_tokens,
        )
        rollout.awaits_fetch, rollout.source = offer.awaits_fetch, offer.source
        return rollout


@dataclass(kw_only=True, eq=False)
class RunningRollouts:
    """Running rollouts, each of which is suspended while it is offered, and offered once.

    These may include rollouts that were admitted before the drain and start during it.
    """

    handoff: RolloutHandoff
    kind: str = "rollouts"
    poll_seconds: float = 0.01
    is_repeated: bool = False
    retry_at: dict[Rollout, float] = field(default_factory=dict)

    def waiting(self) -> list[Rollout]:
        running = [each for each in self.handoff.rollouts.manager.in_flight() if not each.ended]
        return [each for each in running if each.can_suspend] if self.handoff.replicas else []

    def is_over(self) -> bool:
        return self.handoff.rollouts.admission.is_idle or not self.handoff.replicas

    def estimated_bytes(self, rollout: Rollout) -> int:
        return estimated_bytes(rollout, self.handoff.engine)

    @asynccontextmanager
    async def offer(self, rollout: Rollout) -> AsyncIterator[Offer | None]:
        if rollout.ended:
            yield None
            return
        async with rollout.suspended(self.handoff.engine) as is_suspended:
            if is_suspended:
                with self.handoff.offered(rollout) as offer:
                    yield offer
            else:
                yield None


@dataclass(kw_only=True, eq=False)
class Results(RunningRollouts):
    """Results that callers are to fetch, also of rollouts that end during the drain.

    Those that no replica accepts are offered again.
    """

    poll_seconds: float = 0.1
    is_repeated: bool = True

    def waiting(self) -> list[Rollout]:
        return self.handoff.rollouts.manager.results_to_move() if self.handoff.replicas else []

    def is_over(self) -> bool:
        return False

    @asynccontextmanager
    async def offer(self, rollout: Rollout) -> AsyncIterator[Offer | None]:
        if not self.handoff.rollouts.manager.is_result_to_move(rollout):
            yield None
            return
        try:
            with self.handoff.offered(rollout) as offer:
                yield offer
        finally:
            if rollout.moved_to is not None:
                self.handoff.rollouts.manager.on_result_moved(rollout)


def _other_version(state: RolloutState) -> VersionConflict:
    return VersionConflict(f"the active weights version is not {state.version!r}")


def _new_rollout(state: RolloutState) -> NewRollout | None:
    """Request of the groups that have not ended; None if all have."""
    if state.request is None:
        return None
    request = NewRollout.of(state.request, owner=state.owner, can_move=True)
    return replace(request, stream_tokens=state.stream_tokens)


def _prompts(state: RolloutState, request: NewRollout) -> list[list[int]]:
    """Prompts of the groups that have not ended, by index; empty for the others."""
    unfinished = {group.index: group.prompt_token_ids for group in state.groups}
    return [unfinished.get(index, []) for index in range(len(request.groups))]
