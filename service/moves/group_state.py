"""Groups of a moved rollout: their validation, and their continuation here."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.moves import MovedGroup, MovedRollout
from coppice.wire.packed.results import GroupRecord, SampleRecord
from coppice.wire.rollouts import (
    MAX_SAMPLES_PER_GROUP,
    GroupHead,
    SampleAnswer,
    SegmentAnswer,
)
from engine.types.info import EngineInfo
from service.errors import InvalidRequest, PromptTooLong
from service.moves.token_tables import check_ids, checked_tokens
from service.rollouts import validation
from service.rollouts.group import Group
from service.rollouts.request import NewRollout
from service.rollouts.suspended_group import resumed

MAX_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class MovedResults:
    """Results of a moved rollout so far: finished samples and segments, by group, in order.

    `ended` are the indices of the groups that have ended, `unfinished` the tokens of the samples of
    the others, by group and index.
    """

    samples: Mapping[int, Sequence[SampleAnswer]]
    segments: Mapping[int, Sequence[SegmentAnswer]]
    ended: Sequence[int]
    unfinished: Mapping[int, Mapping[int, TokenLists]]


def results_of(state: MovedRollout, vocab_size: int) -> MovedResults:
    """Results in the records of a state; raises InvalidRequest if a part of it is inconsistent.

    The tokens of unfinished samples are checked, too. Segments are those of trees that have ended.
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
    unfinished = {
        group.index: {
            each.index: checked_tokens(each, "groups", vocab_size) for each in group.samples
        }
        for group in state.groups
    }
    for index, found in samples.items():
        _check_indices(index, [sample.index for sample in found])
    for index, answers in segments.items():
        check_ids(answers, str(index), len(answers), "records")
    if state.request is not None and segments:
        raise _invalid_records("has segments, but running trees are not moved")
    return MovedResults(samples, segments, ended, unfinished)


def _check_indices(group: int, indices: Sequence[int]) -> None:
    if len({*indices}) < len(indices) or min(indices) < 0:
        raise _invalid_records(f"group {group} has the index of a sample twice, or a negative one")


def _check_head(head: GroupHead, vocab_size: int) -> None:
    prompt = head.prompt_token_ids or ()
    numbers = [value for value in dict(head).values() if isinstance(value, int)]
    if min(numbers) < 0 or max(numbers) > MAX_COUNT:
        raise _invalid_records(f"a number of group {head.index} is out of range")
    if min(prompt, default=0) < 0 or max(prompt, default=0) >= vocab_size:
        raise _invalid_records(f"token ids must be below {vocab_size}")


def check_groups(state: MovedRollout, results: MovedResults) -> None:
    """Refuse groups that are not those of the request, or have both ended and samples left.

    Without a request, all groups have ended.
    """
    request = state.request
    indices = sorted([*results.ended, *(group.index for group in state.groups)])
    num_groups = len(indices) if request is None else len(request.groups)
    if indices != list(range(num_groups)) or (request is not None and request.continue_from):
        raise InvalidRequest.of_parameter("groups", "they are not those of the request")
    if (request is None) != (not state.groups):
        raise InvalidRequest.of_parameter("request", "needed for the groups, and only then")
    if not results.samples.keys() | results.segments.keys() <= {*indices}:
        raise _invalid_records("a record is of no group of the request")
    for index, samples in results.samples.items():
        limit = MAX_SAMPLES_PER_GROUP if request is None else request.groups[index].n
        if max(sample.index for sample in samples) >= limit:
            raise _invalid_records(f"group {index} has more than {limit} samples")


def check_group(
    moved: MovedGroup, ended: Sequence[SampleAnswer], request: NewRollout, info: EngineInfo
) -> None:
    """Refuse samples that do not fit the request: they would break an assertion of the engine."""
    if max(moved.prompt_token_ids) >= info.vocab_size:
        raise InvalidRequest(f"token ids must be below {info.vocab_size}")
    if len(moved.prompt_token_ids) >= info.max_context_tokens:
        raise PromptTooLong(f"the context holds {info.max_context_tokens} tokens")
    group, given = request.groups[moved.index], moved.num_given_tokens
    if group.token_ids not in (None, moved.prompt_token_ids):
        raise _does_not_fit(moved)
    indices = sorted(sample.index for sample in (*ended, *moved.samples))
    if indices != list(range(group.n)) or len(given) != group.n or not moved.samples:
        raise _does_not_fit(moved)
    if len(moved.sample_seconds) != len(ended):
        raise _does_not_fit(moved)
    for part in moved.samples:
        _check_sample(part, moved, request, info)


def _check_sample(
    part: SampleAnswer, moved: MovedGroup, request: NewRollout, info: EngineInfo
) -> None:
    if moved.num_given_tokens[part.index] > len(part.token_ids):
        raise _does_not_fit(moved)
    if part.token_ids:
        validation.check_sample(part, request, len(moved.prompt_token_ids), info)
        if (part.support is not None) != request.return_support:
            raise _does_not_fit(moved)


def _does_not_fit(moved: MovedGroup) -> InvalidRequest:
    return InvalidRequest.of_parameter("groups", f"group {moved.index} does not fit its request")


def _invalid_records(message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter("records", message)


def num_prompt_tokens_of(moved: MovedGroup) -> int:
    """Tokens of a group's prompt, and those that its samples have so far."""
    return len(moved.prompt_token_ids) + sum(len(sample.token_ids) for sample in moved.samples)


def continued(
    group: Group,
    moved: MovedGroup,
    ended: Sequence[SampleAnswer],
    unfinished: Mapping[int, TokenLists],
) -> Group:
    """Group that continues a moved one; `group` is a new one of the same request."""
    group.seconds_used, group.sample_seconds = moved.seconds_used, moved.sample_seconds
    group.seconds_before = moved.elapsed_seconds
    if moved.num_cached_tokens is not None:
        group.cached_tokens[0] = moved.num_cached_tokens
    group.options = replace(group.options, num_given_tokens=moved.num_given_tokens)
    group.ended, group.suspended, group.num_done = list(ended), dict(unfinished), len(ended)
    for sample in ended if group.finish_policy is not None else ():
        if sample.finish_reason in ("stop", "length"):
            assert group.finish_policy is not None
            group.finish_policy.on_sample_end(sample.index, len(sample.token_ids))
    return resumed(group)
