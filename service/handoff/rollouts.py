"""Rollouts that are handed over: offers of those that are here, and arrival of others."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from coppice.wire.handoff import RolloutOffer, RolloutState
from engine.protocol.generation import Generation
from service.cluster.key_transfers import KeyTransfers
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
    continued,
    estimated_bytes,
    given_tokens,
    restored_tokens,
    state_of,
)
from service.handoff.sender import Offer
from service.rollouts import logprob_tables, validation
from service.rollouts.admission import Admission, Reservation
from service.rollouts.fairness import TimeSlice
from service.rollouts.group import Group
from service.rollouts.group_factory import GroupFactory
from service.rollouts.idempotency import IdempotencyClaim
from service.rollouts.manager import RolloutManager
from service.rollouts.request import NewRollout, Resolved
from service.rollouts.rollout import Rollout
from service.rollouts.sampling import check_sampling
from service.rollouts.suspended_group import can_move
from service.versions import Versions
from service.weights.activation import Activation

NOTHING_LEFT = Resolved(None, None)
Candidates = Callable[[str | None], list[Replica]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutOffers:
    """Offers of rollouts to replicas with the same active weights version."""

    engine: Generation
    versions: Versions
    rollouts: RolloutManager
    cluster_id: str
    candidates: Candidates

    @property
    def replicas(self) -> list[Replica]:
        return self.candidates(self.versions.active.label)

    @contextmanager
    def offer(self, rollout: Rollout) -> Iterator[Offer]:
        """Context manager around the offer of a rollout that does not run.

        `moved_to` is set as soon as a replica has accepted it: a timeout, or an error while the
        connection is closed, must not continue it here, too.
        """

        async def state() -> RolloutOffer:
            found = await state_of(rollout, version=self.versions.active.label)
            return RolloutOffer(**dict(found), source=self.cluster_id)

        def on_accepted(replica: Replica) -> None:
            rollout.moved_to = replica.url

        own = IdempotencyClaim.of_move(rollout.owner, rollout.id)
        rollout.is_moving = True
        try:
            yield Offer(
                id=rollout.id,
                state=state,
                keys=[*{claim.cluster_key for claim in (*rollout.claims, own)}],
                replicas=self.replicas,
                on_accepted=on_accepted,
                is_wanted=lambda: rollout.is_suspended,
            )
        finally:
            rollout.is_moving = False


class RunningRollouts:
    """Running rollouts, each of which is suspended while it is offered, and offered once.

    These may include rollouts that were admitted before the drain and start during it.
    """

    kind = "rollouts"
    poll_seconds = 0.01
    is_repeated = False

    def __init__(self, offers: RolloutOffers, admission: Admission) -> None:
        self._offers = offers
        self._admission = admission
        self.retry_at: dict[Rollout, float] = {}

    def waiting(self) -> list[Rollout]:
        running = [each for each in self._offers.rollouts.in_flight() if not each.ended]
        return [each for each in running if each.can_suspend] if self._offers.replicas else []

    def is_over(self) -> bool:
        return self._admission.is_idle or not self._offers.replicas

    def estimated_bytes(self, rollout: Rollout) -> int:
        return estimated_bytes(rollout, self._offers.engine)

    @asynccontextmanager
    async def offer(self, rollout: Rollout) -> AsyncIterator[Offer | None]:
        if rollout.ended or rollout.moved_to is not None:
            yield None
            return
        async with rollout.suspended(self._offers.engine) as is_suspended:
            if not is_suspended:
                yield None
                return
            with self._offers.offer(rollout) as offer:
                yield offer


class Results:
    """Results that callers are to fetch: of rollouts that have ended, and that end during a drain.

    Those that no replica accepts are offered again.
    """

    kind = "rollouts"
    poll_seconds = 0.1
    is_repeated = True

    def __init__(self, offers: RolloutOffers) -> None:
        self._offers = offers
        self.retry_at: dict[Rollout, float] = {}

    def waiting(self) -> list[Rollout]:
        return self._offers.rollouts.results_to_move() if self._offers.replicas else []

    def is_over(self) -> bool:
        return False

    def estimated_bytes(self, rollout: Rollout) -> int:
        return estimated_bytes(rollout, self._offers.engine)

    @asynccontextmanager
    async def offer(self, rollout: Rollout) -> AsyncIterator[Offer | None]:
        if not self._offers.rollouts.is_result_to_move(rollout):
            yield None
            return
        try:
            with self._offers.offer(rollout) as offer:
                yield offer
        finally:
            if rollout.moved_to is not None:
                self._offers.rollouts.on_result_moved(rollout)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutArrival:
    """Rollout that was restored from an offer, and does not run yet."""

    state: RolloutOffer
    request: NewRollout | None
    resolved: Resolved
    rollout: Rollout
    claims: list[IdempotencyClaim]
    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutArrivals:
    """Rollouts of other replicas, with the same ids, seeds and results.

    None is accepted while sampling is paused.
    """

    engine: Generation
    versions: Versions
    admission: Admission
    group_factory: GroupFactory
    rollouts: RolloutManager
    transfers: KeyTransfers
    activation: Activation
    not_found = RolloutNotFound

    def ids(self, state: RolloutOffer) -> list[str]:
        return [state.id]

    def check(self, state: RolloutOffer) -> None:
        if not self.rollouts.accepts_moves:
            raise NotReady("weights are being activated", retry_after_seconds=RETRY_SECONDS)
        if self.activation.pauses.paused:
            raise NotReady("sampling is paused", retry_after_seconds=RETRY_SECONDS)
        if state.version != self.versions.active.label:
            raise _other_version(state)
        if self.rollouts.has(state.id):
            raise InvalidRequest.of_parameter("id", "the rollout is on this replica already")

    @asynccontextmanager
    async def prepared(self, state: RolloutOffer) -> AsyncIterator[RolloutArrival]:
        request = _new_rollout(state)
        reservation = self._reserve(state, request)
        claims = list[IdempotencyClaim]()
        try:
            resolved = self._resolve(state, request)
            rollout = await self._rollout(state, request, resolved)
            rollout.claims = claims
            yield RolloutArrival(state, request, resolved, rollout, claims, reservation)
        except BaseException:
            for claim in claims:
                self.rollouts.keys.release(claim)
            self.admission.release(reservation)
            raise

    async def take_over_keys(self, arrival: RolloutArrival) -> None:
        """Take over the keys of a rollout: that of its id, and the caller's if there is one.

        The caller's key stays where it is if another rollout has it: a retry has started that one
        while the registry did not respond, or had lost the key. This rollout is found by its id.
        """
        state, taken = arrival.state, arrival.claims
        for claim in _claims_of(state):
            if not self._claim_here(claim, state):
                # Retries must find the rollout with this key here once the source has left.
                await self.transfers.take_back(claim.cluster_key, state.source)
                continue
            taken.append(claim)
            if claim.is_move:
                await self.transfers.take_over(claim.cluster_key, state.source)
            elif not await self.transfers.try_to_take_over(claim.cluster_key, state.source):
                self.rollouts.keys.release(taken.pop())

    def add(self, arrival: RolloutArrival) -> None:
        if self._resolve(arrival.state, arrival.request) != arrival.resolved:
            raise _other_version(arrival.state)
        self.rollouts.run(arrival.rollout, arrival.reservation)
        for claim in arrival.claims:
            self.rollouts.keys.bind(claim, arrival.rollout.id)

    def is_offered(self, rollout_id: str) -> bool:
        rollout = self.rollouts.find(rollout_id)
        return rollout is not None and rollout.is_moving

    async def give_back(self, rollout_id: str) -> bool:
        """Drop the copy of a rollout that its source continues. No caller gets its result here."""
        rollout = self.rollouts.find(rollout_id)
        if rollout is None or rollout.source is None or rollout.moved_to is not None:
            return False
        await self.rollouts.discard(rollout, self.transfers.url_of(rollout.source))
        return True

    def _reserve(self, state: RolloutState, request: NewRollout | None) -> Reservation:
        num_bytes = 0
        if request is not None:
            num_bytes = self.rollouts.factory.support_bytes(request, _prompts(state, request))
        samples = [sample for group in state.groups for sample in group.samples]
        return self.admission.reserve(
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
        resolved = self.rollouts.factory.resolve(request.weights, request.adapter)
        if resolved.adapter != state.adapter:
            raise VersionConflict(f"the adapter here is {resolved.adapter!r}")
        return resolved

    async def _rollout(
        self, state: RolloutOffer, request: NewRollout | None, resolved: Resolved
    ) -> Rollout:
        groups = await self._groups(state, request, resolved)
        rollout = Rollout(
            state.id,
            groups,
            detached=state.detached,
            can_move=True,
            request=state.request,
            owner=state.owner,
        )
        unfinished = {group.index for group in state.groups}
        await rollout.restore(
            state.records,
            [group for group in groups if group.options.index in unfinished],
            num_resumed=given_tokens(state),
            streams_tokens=state.stream_tokens,
        )
        rollout.awaits_fetch, rollout.source = state.awaits_fetch, state.source
        return rollout

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
        groups = await self.group_factory.groups(request, prompts, resolved, {})
        given = given_tokens(state)
        for group in state.groups:
            groups[group.index] = continued(groups[group.index], group, tokens, given)
            await turn.pause()
        return groups

    def _claim_here(self, claim: IdempotencyClaim, state: RolloutState) -> bool:
        """Claim a key on this replica; False if it is a caller's key of another rollout."""
        keys = self.rollouts.keys
        keys.forget_ended(claim, state.id)
        try:
            is_free = keys.claim(claim) is None
        except IdempotencyMismatch:
            is_free = False
        except IdempotencyInProgress:
            message = "a request with the key of the rollout starts"
            raise NotReady(message, retry_after_seconds=RETRY_SECONDS) from None
        if claim.is_move and not is_free:
            raise InvalidRequest.of_parameter("id", "belongs to another rollout here")
        return is_free


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


def _claims_of(state: RolloutState) -> Sequence[IdempotencyClaim]:
    own = IdempotencyClaim.of_move(state.owner, state.id)
    if state.key is None:
        return [own]
    digest = bytes.fromhex(state.key.fingerprint)
    return [own, IdempotencyClaim(state.owner, state.key.key, digest)]
