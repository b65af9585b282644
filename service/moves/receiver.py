"""Receiving side of a move: a rollout of another replica continues here."""

import time
from collections.abc import Callable
from dataclasses import replace

from coppice.wire.moves import MovedGroup, MovedRollout
from coppice.wire.result_formats import GroupRecord, SampleRecord
from coppice.wire.rollouts import RolloutRequest, SampleAnswer
from engine.protocol import Engine
from engine.types import EngineInfo
from service.cluster.key_transfers import KeyTransfers
from service.http.errors import InvalidRequest, NotReady, RolloutNotFound, VersionConflict
from service.moves.cancelled_moves import CancelledMoves
from service.moves.kv_import import KvImporter
from service.moves.state import claims_of
from service.rollouts import validation
from service.rollouts.admission import Admission, Reservation
from service.rollouts.fairness import TimeSlice
from service.rollouts.group import Group
from service.rollouts.group_factory import GroupFactory
from service.rollouts.group_options import GroupOptions
from service.rollouts.idempotency import IdempotencyClaim
from service.rollouts.manager import RolloutManager
from service.rollouts.record_reader import SampleKey
from service.rollouts.rollout import NO_REQUEST, Rollout
from service.rollouts.sampling import check_sampling
from service.rollouts.supports import given_support
from service.rollouts.suspended_group import can_move, resumed, unfinished
from service.weights.versions import Versions

RETRY_SECONDS = 1.0


class MoveReceiver:
    """Continues rollouts that other replicas send, with the same ids, seeds and results.

    A refused rollout leaves nothing here: the sender tries the next replica. None is accepted
    while sampling `is_paused`.
    """

    def __init__(
        self,
        engine: Engine,
        versions: Versions,
        admission: Admission,
        group_factory: GroupFactory,
        rollouts: RolloutManager,
        transfers: KeyTransfers,
        *,
        kv: KvImporter,
        max_samples_per_request: int,
        is_paused: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cancelled = CancelledMoves(clock)
        self._max_samples = max_samples_per_request
        self._is_paused = is_paused
        self._engine = engine
        self._versions = versions
        self._admission = admission
        self._group_factory = group_factory
        self._rollouts = rollouts
        self._transfers = transfers
        self._kv = kv

    async def receive(self, state: MovedRollout) -> Rollout:
        """Continue a rollout; raises a ServiceError if it cannot run here as on its source."""
        self._check(state)
        reservation = self._reserve(state)
        try:
            shared = self._shared(state)
            groups = await self._groups(state, shared)
            claims = await self._take_over(state)
            try:
                return await self._run(state, shared, groups, claims, reservation)
            except BaseException:
                self._release(claims)
                raise
        except BaseException:
            self._admission.release(reservation)
            raise

    async def _run(
        self,
        state: MovedRollout,
        shared: GroupOptions,
        groups: list[Group],
        claims: list[IdempotencyClaim],
        reservation: Reservation,
    ) -> Rollout:
        """Fetch the KV of a rollout and continue it, if the weights are still those of its source.

        A later update makes the engine forget the KV.
        """
        imported = await self._kv.fetch(state)
        try:
            for index, loads in imported.loads.items():
                groups[index].loads = loads
            rollout = await _rollout(state, groups, claims)
            self._check(state)
            if self._shared(state) != shared:
                raise _other_version(state)
            self._rollouts.run(rollout, reservation)
        except BaseException:
            self._kv.release(imported)
            raise
        self._kv.hold(imported, rollout)
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
        await self._rollouts.discard(rollout, self._transfers.url_of(rollout.source))

    def _reserve(self, state: MovedRollout) -> Reservation:
        request, num_bytes = state.request, 0
        if request is not None:
            num_bytes = self._rollouts.support_bytes(request, _prompts(state, request))
        return self._admission.reserve(
            state.owner,
            samples=sum(len(group.samples) for group in state.groups),
            prompt_tokens=_num_prompt_tokens(state),
            support_bytes=num_bytes,
        )

    def _check(self, state: MovedRollout) -> None:
        if not self._rollouts.accepts_moves:
            raise NotReady("weights are being activated", retry_after_seconds=RETRY_SECONDS)
        if self._is_paused():
            raise NotReady("sampling is paused", retry_after_seconds=RETRY_SECONDS)
        if state.version != self._versions.active.label:
            raise _other_version(state)
        if state.id in self._cancelled:
            raise InvalidRequest.of_parameter("id", "the source has cancelled the move")
        if self._rollouts.has(state.id):
            raise InvalidRequest.of_parameter("id", "the rollout is on this replica already")

    def _shared(self, state: MovedRollout) -> GroupOptions:
        """Options of all groups, with the adapter and the exact version as they are now."""
        options = GroupOptions(owner=state.owner, can_move=True, stream_tokens=state.stream_tokens)
        if state.request is None:
            return options
        if not can_move(state.request, options):
            raise InvalidRequest.of_parameter("request", "has options that cannot be moved")
        options = self._rollouts.resolve(state.request, options)
        if options.adapter != state.adapter:
            raise VersionConflict(f"the adapter here is {options.adapter!r}")
        return options

    async def _groups(self, state: MovedRollout, shared: GroupOptions) -> list[Group]:
        """All groups of the request; those that have not ended continue their samples."""
        request = state.request
        if request is None or not state.groups:
            if request is not None or state.groups:
                raise InvalidRequest.of_parameter("request", "needed for the groups, and only then")
            return []
        _check_groups(state, request)
        validation.check(request, max_samples=self._max_samples, is_blocking=False)
        ended, turn = await _ended_samples(state), TimeSlice()
        for group in state.groups:
            await _check_group(group, ended.get(group.index, []), request, self._engine.info)
            await turn.pause()
        await check_sampling(self._engine, request.sampling)
        prompts = _prompts(state, request)
        groups = await self._group_factory.groups(request, prompts, shared, {})
        for group in state.groups:
            index = group.index
            groups[index] = await _continued(groups[index], group, ended.get(index, []))
            await turn.pause()
        return groups

    async def _take_over(self, state: MovedRollout) -> list[IdempotencyClaim]:
        """Take over the keys of a rollout, here and in the cluster registry."""
        taken = list[IdempotencyClaim]()
        try:
            for claim in claims_of(state):
                self._rollouts.keys.forget_ended(claim, state.id)
                if self._rollouts.keys.claim(claim) is not None:
                    raise InvalidRequest.of_parameter("key", "belongs to another rollout here")
                taken.append(claim)
                await self._transfers.take_over(claim.cluster_key, state.source)
                self._rollouts.keys.bind(claim, state.id)
        except BaseException:
            self._release(taken)
            raise
        return taken

    def _release(self, claims: list[IdempotencyClaim]) -> None:
        for claim in claims:
            self._rollouts.keys.release(claim)


def _other_version(state: MovedRollout) -> VersionConflict:
    return VersionConflict(f"the active weights version is not {state.version!r}")


def _num_prompt_tokens(state: MovedRollout) -> int:
    return sum(
        len(group.prompt_token_ids) + sum(len(sample.token_ids) for sample in group.samples)
        for group in state.groups
    )


def _prompts(state: MovedRollout, request: RolloutRequest) -> list[list[int]]:
    """Prompts of the groups that have not ended, by index; empty for the others."""
    moved = {group.index: group.prompt_token_ids for group in state.groups}
    return [moved.get(index, []) for index in range(len(request.groups))]


async def _ended_samples(state: MovedRollout) -> dict[int, list[SampleAnswer]]:
    """Finished samples by group, in the order in which they finished."""
    samples: dict[int, list[SampleAnswer]] = {}
    turn = TimeSlice()
    for record in state.records:
        if isinstance(record, SampleRecord):
            samples.setdefault(record.group, []).append(record.sample)
        await turn.pause()
    return samples


def _check_groups(state: MovedRollout, request: RolloutRequest) -> None:
    """Refuse a state in which a group has neither ended nor samples to continue, or both."""
    ended = [record.group.index for record in state.records if isinstance(record, GroupRecord)]
    indices = sorted([*ended, *(group.index for group in state.groups)])
    if indices != list(range(len(request.groups))) or request.continue_from is not None:
        raise InvalidRequest.of_parameter("groups", "they are not those of the request")


async def _check_group(
    moved: MovedGroup, ended: list[SampleAnswer], request: RolloutRequest, info: EngineInfo
) -> None:
    """Refuse samples that do not fit the request: they would break an assertion of the engine."""
    n, given = request.groups[moved.index].n, moved.num_given_tokens
    indices = sorted(sample.index for sample in (*ended, *moved.samples))
    if indices != list(range(n)) or len(given) != n:
        raise _does_not_fit(moved)
    if max(moved.prompt_token_ids) >= info.vocab_size:
        raise InvalidRequest(f"token ids must be below {info.vocab_size}")
    for part in moved.samples:
        if given[part.index] > len(part.token_ids) or min(part.token_ids, default=0) < 0:
            raise _does_not_fit(moved)
        sample = unfinished(part)
        if part.token_ids:
            validation.check_sample(sample, request, len(moved.prompt_token_ids), info)
            wanted = request.return_support
            await given_support(sample, wanted=wanted, vocab_size=info.vocab_size)
        elif part.logprobs or part.raw_logprobs or part.versions or part.kv_versions:
            raise _does_not_fit(moved)


def _does_not_fit(moved: MovedGroup) -> InvalidRequest:
    return InvalidRequest.of_parameter("groups", f"group {moved.index} does not fit its request")


async def _continued(group: Group, moved: MovedGroup, ended: list[SampleAnswer]) -> Group:
    group.options = replace(group.options, num_given_tokens=moved.num_given_tokens)
    group.ended, group.suspended = ended, moved.samples
    group.num_done, group.seconds_used = len(ended), moved.seconds_used
    group.seconds_before, group.sample_seconds = moved.elapsed_seconds, moved.sample_seconds
    if moved.num_cached_tokens is not None:
        group.cached_tokens[0] = moved.num_cached_tokens
    if group.finish_policy is not None:
        for sample in ended:
            if sample.finish_reason in ("stop", "length"):
                group.finish_policy.on_sample_end(sample.index, len(sample.token_ids))
    return await resumed(group)


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


async def _rollout(
    state: MovedRollout, groups: list[Group], claims: list[IdempotencyClaim]
) -> Rollout:
    rollout = Rollout(
        state.id,
        groups,
        detached=state.detached,
        claims=claims,
        request=state.request or NO_REQUEST,
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
