"""Serialization of a suspended rollout to its wire state, and validated restoring of it."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from coppice.wire.base import MAX_TOKENS
from coppice.wire.columns.token_columns import COLUMNS, TokenFields, TokenLists, columns_of
from coppice.wire.handoff import (
    STATE_VERSION,
    GivenTokens,
    GroupState,
    KeyState,
    RolloutState,
    VersionedState,
)
from coppice.wire.packed.results import GroupRecord, SampleRecord, SegmentRecord
from coppice.wire.rollouts import MAX_SAMPLES_PER_GROUP, GroupHead, SampleAnswer, SegmentAnswer
from engine.protocol.generation import Generation
from engine.types.info import EngineInfo
from service.cluster.idempotency_claim import IdempotencyClaim
from service.errors import InvalidRequest, PromptTooLong
from service.rollouts import validation
from service.rollouts.groups.group import Group
from service.rollouts.groups.sample_answer import answer_fields
from service.rollouts.groups.suspended_group import resumed
from service.rollouts.record_reader import SampleKey
from service.rollouts.request import NewRollout
from service.rollouts.rollout import Rollout

ResultRecord = SampleRecord | SegmentRecord | GroupRecord
TOKEN_BYTES = 36
"""A token id and its logprob in JSON."""
MAX_COUNT = 2**53
MAX_DIGITS = 10
VERSION_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


async def state_of(rollout: Rollout, *, version: str) -> RolloutState:
    """State of a rollout whose groups have ended or are suspended."""
    groups = [each for each in rollout.groups if each.suspended]
    request = rollout.request if groups else None
    claims = [claim for claim in rollout.claims if not claim.is_move]
    return RolloutState(
        state_version=STATE_VERSION,
        id=rollout.id,
        owner=rollout.owner,
        version=version,
        key=key_state(claims[0]) if claims else None,
        adapter=rollout.adapter,
        awaits_fetch=rollout.awaits_fetch or not rollout.ended,
        detached=rollout.detached,
        stream_tokens=rollout.log.streams_tokens,
        given=[
            GivenTokens(group=group, index=index, num_tokens=number)
            for (group, index), number in rollout.log.num_resumed.items()
            if number
        ],
        request=request and request.model_copy(update={"continue_from": None}),
        records=[each for each in rollout.log.records if isinstance(each, ResultRecord)],
        groups=[await _group_state(group) for group in groups],
    )


def key_state(claim: IdempotencyClaim) -> KeyState:
    """State of a caller's key, without the name of the resource that it belongs to."""
    return KeyState(key=claim.key.rpartition("\n")[2], fingerprint=claim.fingerprint.hex())


def claim_of(
    state: VersionedState, key: KeyState | None, resource: str | None = None
) -> IdempotencyClaim | None:
    if key is None:
        return None
    return IdempotencyClaim.of(state.owner, key.key, bytes.fromhex(key.fingerprint), resource)


async def _group_state(group: Group) -> GroupState:
    samples = [
        SampleAnswer(
            **await answer_fields(tokens, SampleAnswer), index=index, finish_reason="aborted"
        )
        for index, tokens in group.suspended.items()
    ]
    return GroupState(
        index=group.options.index,
        prompt_token_ids=group.options.prompt_token_ids,
        num_cached_tokens=group.cached_tokens.get(0),
        seconds_used=group.seconds_used,
        elapsed_seconds=group.elapsed_seconds,
        sample_seconds=group.sample_seconds,
        samples=samples,
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


@dataclass(frozen=True, slots=True)
class RestoredTokens:
    """Results in a state, by group and in order, and its unfinished samples, by group and index.

    `ended` are the indices of the groups that have ended.
    """

    samples: Mapping[int, Sequence[SampleAnswer]]
    ended: Sequence[int]
    unfinished: Mapping[int, Mapping[int, TokenLists]]


def restored_tokens(state: RolloutState, vocab_size: int) -> RestoredTokens:
    """Results and tokens of a state; raises InvalidRequest if they are inconsistent.

    It may take long and is called in a thread.
    """
    samples = defaultdict[int, list[SampleAnswer]](list)
    segments = defaultdict[int, list[SegmentAnswer]](list)
    ended = list[int]()
    for record in state.records:
        index = record.group.index if isinstance(record, GroupRecord) else record.group
        if index in ended:
            raise _invalid_records("a record follows the end of its group")
        if isinstance(record, GroupRecord):
            _check_head(record.group, vocab_size)
            ended.append(index)
        elif isinstance(record, SampleRecord):
            checked_tokens(record.sample, "records", vocab_size)
            samples[index].append(record.sample)
        else:
            checked_tokens(record.segment, "records", vocab_size)
            segments[index].append(record.segment)
    for index, answers in segments.items():
        check_ids(answers, str(index), len(answers), "records")
    if state.request is not None and segments:
        raise _invalid_records("has segments, but a running tree has no state")
    _check_groups(state, ended, samples, segments)
    unfinished = {
        group.index: {
            each.index: checked_tokens(each, "groups", vocab_size) for each in group.samples
        }
        for group in state.groups
    }
    _check_given(state, samples)
    return RestoredTokens(samples, ended, unfinished)


def _check_groups(
    state: RolloutState,
    ended: Sequence[int],
    samples: Mapping[int, Sequence[SampleAnswer]],
    segments: Mapping[int, Sequence[SegmentAnswer]],
) -> None:
    """Refuse groups that are not those of the request, or have both ended and samples left.

    Without a request, all groups have ended.
    """
    request = state.request
    indices = sorted([*ended, *(group.index for group in state.groups)])
    num_groups = len(indices) if request is None else len(request.groups)
    if indices != list(range(num_groups)) or (request is not None and request.continue_from):
        raise InvalidRequest.of_parameter("groups", "they are not those of the request")
    if (request is None) != (not state.groups):
        raise InvalidRequest.of_parameter("request", "needed for the groups, and only then")
    if not samples.keys() | segments.keys() <= {*indices}:
        raise _invalid_records("a record is of no group of the request")
    for index, found in samples.items():
        limit = MAX_SAMPLES_PER_GROUP if request is None else request.groups[index].n
        numbers = {sample.index for sample in found}
        if len(numbers) < len(found) or min(numbers) < 0 or max(numbers) >= limit:
            raise _invalid_records(f"group {index} has the index of a sample twice, or no such one")


def _check_given(state: RolloutState, samples: Mapping[int, Sequence[SampleAnswer]]) -> None:
    given = given_tokens(state)
    unfinished = [(group.index, sample) for group in state.groups for sample in group.samples]
    for index, sample in [*unfinished, *((i, each) for i in samples for each in samples[i])]:
        if given.get((index, sample.index), 0) > len(sample.token_ids):
            raise InvalidRequest.of_parameter("given", "a sample has fewer tokens")


def given_tokens(state: RolloutState) -> dict[SampleKey, int]:
    """Numbers of the tokens that `continue_from` gave, by group and sample."""
    return {(each.group, each.index): each.num_tokens for each in state.given}


def _check_head(head: GroupHead, vocab_size: int) -> None:
    numbers = [value for value in dict(head).values() if isinstance(value, int)]
    if min(numbers) < 0 or max(numbers) > MAX_COUNT:
        raise _invalid_records(f"a number of group {head.index} is out of range")
    _check_vocabulary(head.prompt_token_ids or (), vocab_size, "records", "prompt_token_ids")


def check_group(
    state: GroupState, ended: Sequence[SampleAnswer], request: NewRollout, info: EngineInfo
) -> None:
    """Refuse samples that do not fit the request: they would break an assertion of the engine."""
    prompt = state.prompt_token_ids
    _check_vocabulary(prompt, info.vocab_size, "groups", "prompt_token_ids")
    if len(prompt) >= info.max_context_tokens:
        raise PromptTooLong(f"the context holds {info.max_context_tokens} tokens")
    group = request.groups[state.index]
    indices = sorted(sample.index for sample in (*ended, *state.samples))
    if (
        group.token_ids not in (None, prompt)
        or indices != list(range(group.n))
        or not state.samples
        or len(state.sample_seconds) != len(ended)
        or not all(_fits(sample, state, request, info) for sample in state.samples)
    ):
        message = f"group {state.index} does not fit its request"
        raise InvalidRequest.of_parameter("groups", message)


def _fits(sample: SampleAnswer, group: GroupState, request: NewRollout, info: EngineInfo) -> bool:
    """True if an unfinished sample has the columns that its request asks for."""
    num_tokens, num_prompt_tokens = len(sample.token_ids), len(group.prompt_token_ids)
    if not num_tokens:
        return True
    validation.check_sample(sample, request, num_prompt_tokens, info)
    experts, is_wanted = sample.routed_experts, bool(request.return_routed_experts)
    if experts is not None:
        end = num_prompt_tokens + num_tokens - 1
        is_wanted = is_wanted and experts.start + experts.shape[0] == end
    return (
        (sample.support is not None) == request.return_support
        and (sample.top_logprobs is not None) == (request.top_logprobs is not None)
        and (sample.given_logprobs is not None) == (request.logprob_token_ids is not None)
        and (experts is None or is_wanted)
    )


def continued(
    group: Group,
    state: GroupState,
    tokens: RestoredTokens,
    given: Mapping[SampleKey, int],
) -> Group:
    """Group that goes on from a state; `group` is a new one of the same request."""
    index = state.index
    ended = tokens.samples.get(index, ())
    group.seconds_used, group.sample_seconds = state.seconds_used, state.sample_seconds
    group.seconds_before = state.elapsed_seconds
    if state.num_cached_tokens is not None:
        group.cached_tokens[0] = state.num_cached_tokens
    numbers = [given.get((index, each), 0) for each in range(group.options.n)]
    group.options = replace(group.options, num_given_tokens=numbers)
    group.ended, group.num_done = list(ended), len(ended)
    group.suspended = dict(tokens.unfinished[index])
    for sample in ended if group.finish_policy is not None else ():
        if sample.finish_reason in ("stop", "length"):
            assert group.finish_policy is not None
            group.finish_policy.on_sample_end(sample.index, len(sample.token_ids))
    return resumed(group)


def check_ids(segments: Iterable[SegmentAnswer], prefix: str, end: int, where: str) -> None:
    """Refuse ids that are not `prefix` and a number below `end`, repeated ids, unknown parents."""
    found: set[str | None] = {None}
    for segment in segments:
        head, _, number = segment.id.rpartition(".")
        if head != prefix or not _is_number(number) or int(number) >= end:
            raise invalid(where, "segments", "an id is not one of the tree")
        if segment.id in found or segment.parent not in found:
            raise invalid(where, "segments", "a segment is repeated or has no parent")
        found.add(segment.id)


def _is_number(text: str) -> bool:
    """True for a decimal number without leading zeros."""
    is_decimal = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return is_decimal and (text == "0" or text[0] != "0")


def checked_tokens(answer: TokenFields, where: str, vocab_size: int) -> TokenLists:
    """Columns of a sample or segment; refuses those of which one does not fit the others.

    It may take long for many tokens and is called in a thread.
    """
    num_tokens, support = len(answer.token_ids), answer.support
    _check_vocabulary(answer.token_ids, vocab_size, where, "token_ids")
    if support is not None and support.vocab_size != vocab_size:
        raise invalid(where, "support", f"needs one of a vocabulary of {vocab_size}")
    try:
        tokens = columns_of(answer)
    except ValueError as error:
        raise invalid(where, "support", str(error)) from error
    for name, values in tokens.columns().items():
        if values is not None and not COLUMNS[name].fits(values, num_tokens):
            raise invalid(where, name, "does not fit the tokens")
    labels = {span.version for span in tokens.versions}
    labels |= {span.version for span in tokens.kv_versions}
    if not all(map(VERSION_LABEL.fullmatch, labels)):
        raise invalid(where, "versions", "a label is not that of a weights version")
    if any(span.end > 2 * MAX_TOKENS for span in tokens.kv_versions):
        raise invalid(where, "kv_versions", "a span has too many positions")
    return tokens


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int, where: str, name: str) -> None:
    if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= vocab_size:
        raise invalid(where, name, f"token ids must be below {vocab_size}")


def _invalid_records(message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter("records", message)


def invalid(where: str, name: str, message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter(f"{where}.{name}", message)
