"""Logprobs of several tokens per position as tensors of a packed result.

A table NAME has three tensors; position i owns NAME.offsets[i]:NAME.offsets[i + 1] of the others:

    NAME.offsets    int64    [positions + 1]
    NAME.token_ids  int32    [entries]
    NAME.logprobs   float32  [entries]

`top_logprobs` and `given_logprobs` have a position per token of the result, in the order of
`token_ids`.
`raw_logprobs`, float32, has one value per token, if it was requested.
`prompt_logprobs.top_logprobs` has a position per prompt token after the first of each group that
has prompt logprobs, and `prompt_logprobs.logprobs` these tokens' own logprobs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coppice.wire.logprobs import PromptLogprobs, TokenLogprobs
from coppice.wire.rollouts import GroupAnswer, RolloutAnswer, SampleAnswer, SegmentAnswer

Part = TypeVar("Part", SampleAnswer, SegmentAnswer)
Tensors = dict[str, NDArray[Any]]
PART_TABLES = ("top_logprobs", "given_logprobs")
RAW = "raw_logprobs"
PROMPT, PROMPT_TOP = "prompt_logprobs.logprobs", "prompt_logprobs.top_logprobs"
NO_ENTRIES = TokenLogprobs.empty(0)


def table_tensors(
    name: str, tables: Sequence[TokenLogprobs | None], lengths: Sequence[int]
) -> Tensors:
    """Tensors of a table, joined from those of several parts; none if no part has one."""
    if all(table is None for table in tables):
        return {}
    pairs = zip(tables, lengths, strict=True)
    joined = TokenLogprobs.joined(
        TokenLogprobs.empty(length) if table is None else table for table, length in pairs
    )
    return {f"{name}.{field}": getattr(joined, field) for field in TokenLogprobs.model_fields}


def tables_of(
    name: str, tensors: Mapping[str, NDArray[Any]], lengths: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """Tables of the parts of a packed result. Raises ValueError if they are inconsistent."""
    if f"{name}.offsets" not in tensors:
        return iter([NO_ENTRIES] * len(lengths))
    fields = {field: tensors.get(f"{name}.{field}") for field in TokenLogprobs.model_fields}
    table = TokenLogprobs.model_validate(fields)
    if table.num_positions != sum(lengths):
        raise ValueError(f"{name} does not match the tokens")
    return table.split(lengths)


def part_tensors(parts: Sequence[SampleAnswer | SegmentAnswer], lengths: Sequence[int]) -> Tensors:
    """Tensors of the tables of a result's samples and segments."""
    tensors = Tensors()
    for name in PART_TABLES:
        tensors |= table_tensors(name, [getattr(part, name) for part in parts], lengths)
    if any(part.raw_logprobs is not None for part in parts):
        raw = [part.raw_logprobs or [np.nan] * len(part.token_ids) for part in parts]
        tensors[RAW] = np.concatenate([np.array(values, np.float32) for values in raw])
    return tensors


def prompt_tensors(groups: Iterable[GroupAnswer]) -> Tensors:
    found = [group.prompt_logprobs for group in groups if group.prompt_logprobs is not None]
    if not found:
        return {}
    lengths = [len(prompt.logprobs) for prompt in found]
    return {
        PROMPT: np.concatenate([prompt.logprobs for prompt in found]),
        **table_tensors(PROMPT_TOP, [prompt.top_logprobs for prompt in found], lengths),
    }


def without_tables(group: GroupAnswer) -> GroupAnswer:
    """Copy of a group with empty tables; a table that is missing stays missing."""
    prompt = group.prompt_logprobs
    if prompt is not None:
        empty = {"logprobs": np.zeros(0, np.float32), "top_logprobs": NO_ENTRIES}
        group = group.model_copy(update={"prompt_logprobs": prompt.model_copy(update=empty)})
    empty_parts: dict[str, Iterator[Any]] = {name: repeat(NO_ENTRIES) for name in PART_TABLES}
    return _with_parts(group, {**empty_parts, RAW: repeat([])})


def with_tables(
    answer: RolloutAnswer, tensors: Mapping[str, NDArray[Any]], lengths: Sequence[int]
) -> RolloutAnswer:
    """Inverse of `without_tables`: fill the tables of a packed result's answer."""
    tables: dict[str, Iterator[Any]] = {
        name: tables_of(name, tensors, lengths) for name in PART_TABLES
    }
    tables[RAW] = _raw_of(tensors, lengths)
    groups = [_with_parts(group, tables) for group in answer.groups]
    return answer.model_copy(update={"groups": list(_with_prompts(groups, tensors))})


def _raw_of(tensors: Mapping[str, NDArray[Any]], lengths: Sequence[int]) -> Iterator[list[float]]:
    raw = tensors.get(RAW)
    if raw is None:
        return repeat([])
    if len(raw) != sum(lengths):
        raise ValueError(f"{RAW} does not match the tokens")
    return (part.tolist() for part in np.split(raw, np.cumsum(lengths)[:-1]))


def _with_parts(group: GroupAnswer, tables: Mapping[str, Iterator[Any]]) -> GroupAnswer:
    def filled(part: Part) -> Part:
        found = {name: next(values) for name, values in tables.items()}
        present = {name: found[name] for name in found if getattr(part, name) is not None}
        return part.model_copy(update=present) if present else part

    samples = [filled(sample) for sample in group.samples]
    segments = None if group.segments is None else [filled(each) for each in group.segments]
    return group.model_copy(update={"samples": samples, "segments": segments})


def _with_prompts(
    groups: Iterable[GroupAnswer], tensors: Mapping[str, NDArray[Any]]
) -> Iterator[GroupAnswer]:
    groups = list(groups)
    having = [group for group in groups if group.prompt_logprobs is not None]
    lengths = [group.num_prompt_tokens - 1 for group in having]
    tables = tables_of(PROMPT_TOP, tensors, lengths)
    own = tensors.get(PROMPT, np.zeros(sum(lengths), np.float32))
    if len(own) != sum(lengths):
        raise ValueError(f"{PROMPT} does not match the prompts")
    logprobs = iter(np.split(own, np.cumsum(lengths)[:-1]))
    for group in groups:
        prompt = group.prompt_logprobs
        if prompt is not None:
            filled = PromptLogprobs(
                logprobs=next(logprobs), top_logprobs=next(tables), version=prompt.version
            )
            group = group.model_copy(update={"prompt_logprobs": filled})
        yield group
