"""State of a suspended rollout, as it is sent to another replica."""

from coppice.wire.moves import FORMAT, GivenTokens, MovedGroup, MovedKey, MovedRollout
from coppice.wire.packed.results import GroupRecord, SampleRecord, SegmentRecord
from coppice.wire.rollouts import RolloutRequest, SampleAnswer
from engine.protocol.generation import Generation
from service.cluster.idempotency_claim import IdempotencyClaim
from service.rollouts.group import Group
from service.rollouts.group_options import num_given
from service.rollouts.rollout import Rollout
from service.rollouts.sample_answer import answer_fields

MovedRecord = SampleRecord | SegmentRecord | GroupRecord
TOKEN_BYTES = 36
"""A token id and its logprob in JSON."""


async def state_of(rollout: Rollout, *, source: str, version: str) -> MovedRollout:
    """State of a rollout whose groups have ended or are suspended.

    Constructed without validation, which takes long for many tokens.
    """
    groups = [each for each in rollout.groups if each.suspended]
    return MovedRollout.model_construct(
        format=FORMAT,
        id=rollout.id,
        source=source,
        owner=rollout.owner,
        version=version,
        key=_key(rollout),
        adapter=rollout.adapter,
        awaits_fetch=rollout.awaits_fetch or not rollout.ended,
        detached=rollout.detached,
        stream_tokens=rollout.log.streams_tokens,
        given=[
            GivenTokens.model_construct(group=group, index=index, num_tokens=number)
            for (group, index), number in rollout.log.num_resumed.items()
            if number
        ],
        request=_request(rollout) if groups else None,
        records=[each for each in rollout.log.records if isinstance(each, MovedRecord)],
        groups=[await _moved_group(group) for group in groups],
    )


def estimated_bytes(rollout: Rollout, engine: Generation) -> int:
    """Estimated size of the state as JSON, in bytes, before the rollout is suspended.

    The results take about half of the memory that they are counted with.
    """
    running = sum(_num_tokens(group, engine) for group in rollout.groups)
    return rollout.log.num_bytes // 2 + TOKEN_BYTES * running


def _num_tokens(group: Group, engine: Generation) -> int:
    """Tokens of a group's prompt and of its running samples."""
    ids = [group.sample_ids[index] for index in group.running_indices()]
    prior = sum(len(sample.token_ids) for sample in group.options.continued)
    new = sum(span.end - span.start for spans in engine.progress(ids) for span in spans)
    return len(group.options.prompt_token_ids) + prior + new


def _key(rollout: Rollout) -> MovedKey | None:
    claims = [claim for claim in rollout.claims if not claim.is_move]
    if not claims:
        return None
    return MovedKey(key=claims[0].key, fingerprint=claims[0].fingerprint.hex())


def _request(rollout: Rollout) -> RolloutRequest:
    assert rollout.request is not None, "groups are left"
    return rollout.request.model_copy(update={"continue_from": None})


async def _moved_group(group: Group) -> MovedGroup:
    options = group.options
    samples = [
        SampleAnswer(
            **await answer_fields(tokens, SampleAnswer), index=index, finish_reason="aborted"
        )
        for index, tokens in group.suspended.items()
    ]
    return MovedGroup.model_construct(
        index=options.index,
        prompt_token_ids=options.prompt_token_ids,
        num_given_tokens=[num_given(options, index) for index in range(options.n)],
        num_cached_tokens=group.cached_tokens.get(0),
        seconds_used=group.seconds_used,
        elapsed_seconds=group.elapsed_seconds,
        sample_seconds=group.sample_seconds,
        samples=samples,
    )


def claims_of(state: MovedRollout) -> list[IdempotencyClaim]:
    """Keys of a moved rollout: that of its id, and the caller's if there is one."""
    claims = [IdempotencyClaim.of_move(state.owner, state.id)]
    if state.key is not None:
        digest = bytes.fromhex(state.key.fingerprint)
        claims.append(IdempotencyClaim(state.owner, state.key.key, digest))
    return claims
