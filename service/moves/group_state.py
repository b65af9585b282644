"""Groups of a moved rollout: their validation, and their continuation here."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coppice.wire.moves import MovedGroup, MovedRollout
from coppice.wire.result_formats import GroupRecord, SampleRecord, SegmentRecord
from coppice.wire.rollouts import RolloutRequest, SampleAnswer, SegmentAnswer
from engine.types import EngineInfo
from service.http.errors import InvalidRequest
from service.moves.segment_state import check_ids
from service.moves.tree_state import WHERE, restore_tree
from service.rollouts import validation
from service.rollouts.fairness import TimeSlice
from service.rollouts.group import Group
from service.rollouts.supports import given_support
from service.rollouts.suspended_group import resumed, unfinished
from service.trees.tree_group import TreeGroup


@dataclass(frozen=True, slots=True)
class MovedResults:
    """Results of a moved rollout so far: finished samples and segments, by group, in order."""

    samples: Mapping[int, Sequence[SampleAnswer]]
    segments: Mapping[int, Sequence[SegmentAnswer]]


async def results_of(state: MovedRollout) -> MovedResults:
    """Results in the records of a state; refuses segments that are not those of trees."""
    samples = defaultdict[int, list[SampleAnswer]](list)
    segments = defaultdict[int, list[SegmentAnswer]](list)
    turn = TimeSlice()
    for record in state.records:
        if isinstance(record, SampleRecord):
            samples[record.group].append(record.sample)
        elif isinstance(record, SegmentRecord):
            segments[record.group].append(record.segment)
        await turn.pause()
    if segments:
        await asyncio.to_thread(_check_ids, segments)
    if segments and state.request is not None and state.request.branching is None:
        raise InvalidRequest.of_parameter("records", "has segments, but the request no branching")
    return MovedResults(samples, segments)


def _check_ids(segments: Mapping[int, Sequence[SegmentAnswer]]) -> None:
    for group, answers in segments.items():
        check_ids(answers, str(group), len(answers), "records")


def check_results(results: MovedResults, request: RolloutRequest) -> None:
    """Refuse more results of a group than its request allows: they are kept in memory.

    A segment that ends at a cut has at least one token.
    """
    for index, group in enumerate(request.groups):
        limit = validation.num_samples_of(request, group)
        finishes = [each.finish_reason for each in results.segments.get(index, ())]
        num_leaves = len(finishes) - finishes.count("cut")
        if max(num_leaves, len(results.samples.get(index, ()))) > limit:
            raise InvalidRequest.of_parameter("records", f"group {index} has more than {limit}")
        tokens = 0 if request.branching is None else request.branching.max_new_tokens_total
        if finishes.count("cut") > tokens:
            raise InvalidRequest.of_parameter("records", f"group {index} has too many segments")


def check_groups(state: MovedRollout, request: RolloutRequest) -> None:
    """Refuse a state in which a group has neither ended nor samples to continue, or both."""
    ended = [record.group.index for record in state.records if isinstance(record, GroupRecord)]
    indices = sorted([*ended, *(group.index for group in state.groups)])
    if indices != list(range(len(request.groups))) or request.continue_from is not None:
        raise InvalidRequest.of_parameter("groups", "they are not those of the request")


async def check_group(
    moved: MovedGroup, ended: Sequence[SampleAnswer], request: RolloutRequest, info: EngineInfo
) -> None:
    """Refuse samples that do not fit the request: they would break an assertion of the engine."""
    if max(moved.prompt_token_ids) >= info.vocab_size:
        raise InvalidRequest(f"token ids must be below {info.vocab_size}")
    if request.branching is not None:
        if moved.tree is None or moved.samples or moved.num_given_tokens or ended:
            raise _does_not_fit(moved)
        return
    n, given = request.groups[moved.index].n, moved.num_given_tokens
    indices = sorted(sample.index for sample in (*ended, *moved.samples))
    if indices != list(range(n)) or len(given) != n or not moved.samples or moved.tree is not None:
        raise _does_not_fit(moved)
    for part in moved.samples:
        await _check_sample(part, moved, request, info)


async def _check_sample(
    part: SampleAnswer, moved: MovedGroup, request: RolloutRequest, info: EngineInfo
) -> None:
    num_given = moved.num_given_tokens[part.index]
    if num_given > len(part.token_ids) or min(part.token_ids, default=0) < 0:
        raise _does_not_fit(moved)
    sample = unfinished(part)
    if part.token_ids:
        validation.check_sample(sample, request, len(moved.prompt_token_ids), info)
        wanted = request.return_support
        await given_support(sample, wanted=wanted, vocab_size=info.vocab_size)
    elif part.logprobs or part.raw_logprobs or part.versions or part.kv_versions:
        raise _does_not_fit(moved)


def _does_not_fit(moved: MovedGroup) -> InvalidRequest:
    return InvalidRequest.of_parameter(WHERE, f"group {moved.index} does not fit its request")


def num_samples_of(moved: MovedGroup, request: RolloutRequest | None) -> int:
    """Maximum number of samples that a group may have in the engine at once.

    For a tree it is the number of leaves below its paths; leaves that have ended do not count.
    """
    if moved.tree is None or request is None or request.branching is None:
        return len(moved.samples)
    return min(request.branching.max_leaves, sum(path.num_leaves for path in moved.tree.paths))


def num_prompt_tokens_of(moved: MovedGroup) -> int:
    """Tokens of a group's prompt, and those that its samples or paths have so far."""
    paths = () if moved.tree is None else moved.tree.paths
    num_tokens = sum(len(sample.token_ids) for sample in moved.samples)
    num_tokens += sum(len(path.segment.token_ids) for path in paths)
    return len(moved.prompt_token_ids) + num_tokens


async def continued(
    group: Group, moved: MovedGroup, results: MovedResults, vocab_size: int
) -> Group:
    """Group that continues a moved one; `group` is a new one of the same request."""
    index = moved.index
    group.seconds_used, group.sample_seconds = moved.seconds_used, moved.sample_seconds
    group.seconds_before = moved.elapsed_seconds
    if moved.num_cached_tokens is not None:
        group.cached_tokens[0] = moved.num_cached_tokens
    if isinstance(group, TreeGroup):
        assert moved.tree is not None, "it was checked"
        segments = results.segments.get(index, [])
        await asyncio.to_thread(restore_tree, group, moved.tree, segments, vocab_size)
    else:
        _restore_samples(group, moved, results.samples.get(index, []))
    return await resumed(group)


def _restore_samples(group: Group, moved: MovedGroup, ended: Sequence[SampleAnswer]) -> None:
    group.options = replace(group.options, num_given_tokens=moved.num_given_tokens)
    group.ended, group.suspended, group.num_done = list(ended), moved.samples, len(ended)
    for sample in ended if group.finish_policy is not None else ():
        if sample.finish_reason in ("stop", "length"):
            assert group.finish_policy is not None
            group.finish_policy.on_sample_end(sample.index, len(sample.token_ids))
