"""Scoring: teacher-forced logprobs of given responses, each on a single weights version.

vLLM may prefill a long prompt in chunks, and an activation between two chunks would mix versions
undetected. A computation that spans an activation is therefore repeated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from coppice.wire.columns.logprobs import PromptLogprobs
from coppice.wire.rollouts import WeightsConstraint
from coppice.wire.score import ScoreAnswer, ScoredItem, ScoredResponse, ScoreItem, ScoreRequest
from engine.protocol.generation import Generation
from engine.types.info import EngineInfo
from engine.types.samples import TopLogprobRows
from service.adapters.manager import AdapterManager
from service.errors import InvalidRequest, PromptTooLong
from service.http.exception_handlers import to_service_error
from service.rollouts.admission import Admission
from service.rollouts.groups.logprob_tables import (
    MAX_COMPUTED_LOGPROBS,
    check_count,
    check_finite,
    check_total,
    given_table,
    padded_token_ids,
    to_prompt_logprobs,
    to_table,
)
from service.rollouts.manager import RolloutManager
from service.rollouts.request import NewRollout
from service.rollouts.tokenizer import Tokenizer
from service.rollouts.validation import MAX_SAMPLES
from service.weights_versions import Versions

Result = TypeVar("Result", list[float], TopLogprobRows)
ComputedResult: TypeAlias = Coroutine[Any, Any, tuple[Result, str, str | None]]


class ScoringOptions(NamedTuple):
    """Weights constraint and adapter of a scoring request, common to all its responses."""

    weights: WeightsConstraint | None
    adapter: str | None
    top_logprobs: int = 0


class Scoring:
    """Computes logprobs of given responses and prompts; keeps no state between requests."""

    def __init__(
        self,
        engine: Generation,
        versions: Versions,
        tokenizer: Tokenizer,
        rollouts: RolloutManager,
        adapters: AdapterManager,
        admission: Admission,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._tokenizer = tokenizer
        self._rollouts = rollouts
        self._adapters = adapters
        self._admission = admission

    async def score(self, request: ScoreRequest, *, owner: str) -> ScoreAnswer:
        num_responses = sum(len(item.responses) for item in request.items)
        if num_responses > MAX_SAMPLES:
            raise InvalidRequest(
                f"{num_responses} responses; the limit is {MAX_SAMPLES} per request"
            )
        _check_logprobs(request, self._engine.info)
        prompts = await self._tokenizer.all_token_ids([item.prompt for item in request.items])
        pairs = list(zip(request.items, prompts, strict=True))
        for item, prompt in pairs:
            self._check(prompt, item.responses)
        _check_computed(request.top_logprobs or 0, pairs)
        num_tokens = sum(len(p) + sum(map(len, item.responses)) for item, p in pairs)
        with self._admission.reserved(owner, samples=num_responses, prompt_tokens=num_tokens):
            options = ScoringOptions(request.weights, request.adapter, request.top_logprobs or 0)
            return await self._score_items(pairs, options)

    async def prompt_logprobs(
        self, request: NewRollout, prompts: list[list[int]]
    ) -> list[PromptLogprobs]:
        """Prompt logprobs of a rollout request, whose samples are admitted already."""
        options = ScoringOptions(request.weights, request.adapter, request.prompt_logprobs or 0)
        try:
            async with asyncio.TaskGroup() as tasks:
                scored = [tasks.create_task(self._prompt(prompt, options)) for prompt in prompts]
        except ExceptionGroup as failures:
            raise to_service_error(failures) from failures
        return [task.result() for task in scored]

    async def _prompt(self, prompt: list[int], options: ScoringOptions) -> PromptLogprobs:
        rows, version, _ = await self._compute_on_one_version(
            lambda adapter: self._engine.top_logprobs(prompt, options.top_logprobs, adapter),
            options,
        )
        return await to_prompt_logprobs(rows, version)

    async def _score_items(
        self, pairs: list[tuple[ScoreItem, list[int]]], options: ScoringOptions
    ) -> ScoreAnswer:
        try:
            async with asyncio.TaskGroup() as tasks:
                items = [
                    tasks.create_task(self._item(item, prompt, options)) for item, prompt in pairs
                ]
        except ExceptionGroup as failures:
            raise to_service_error(failures) from failures
        return ScoreAnswer(items=[item.result() for item in items])

    def _check(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        limit, vocabulary = self._engine.info.max_context_tokens, self._engine.info.vocab_size
        longest = max(map(len, responses), default=0)
        if len(prompt) + longest >= limit:
            raise PromptTooLong(
                f"{len(prompt)} prompt and {longest} response tokens; "
                f"together they must be below {limit}"
            )
        if any(max(tokens, default=0) >= vocabulary for tokens in (prompt, *responses)):
            raise InvalidRequest(f"token ids must be below {vocabulary}")

    async def _item(
        self, item: ScoreItem, prompt: list[int], options: ScoringOptions
    ) -> ScoredItem:
        given: Sequence[list[list[int]] | None] = item.logprob_token_ids or [None] * len(
            item.responses
        )
        async with asyncio.TaskGroup() as tasks:
            scored = [
                tasks.create_task(self._response(prompt, response, token_ids, options))
                for response, token_ids in zip(item.responses, given, strict=True)
            ]
        return ScoredItem(
            num_prompt_tokens=len(prompt), responses=[task.result() for task in scored]
        )

    async def prompts(
        self,
        prompts: Sequence[list[int]],
        num_top_logprobs: int,
        *,
        owner: str,
        options: ScoringOptions,
    ) -> list[TopLogprobRows]:
        """Top-k logprobs at the positions of each given prompt, in the order of the prompts.

        Each prompt is computed on one weights version.
        """
        for prompt in prompts:
            self._check(prompt, [])

        def score_prompt(prompt: list[int]) -> ComputedResult[TopLogprobRows]:
            return self._compute_on_one_version(
                lambda adapter: self._engine.top_logprobs(prompt, num_top_logprobs, adapter),
                options,
            )

        num_tokens = sum(map(len, prompts))
        with self._admission.reserved(owner, samples=len(prompts), prompt_tokens=num_tokens):
            try:
                async with asyncio.TaskGroup() as tasks:
                    scored = [tasks.create_task(score_prompt(prompt)) for prompt in prompts]
            except ExceptionGroup as failures:
                raise to_service_error(failures) from failures
        return [task.result()[0] for task in scored]

    async def _response(
        self,
        prompt: list[int],
        response: list[int],
        given: list[list[int]] | None,
        options: ScoringOptions,
    ) -> ScoredResponse:
        if not (options.top_logprobs or given):
            logprobs, version, adapter = await self._compute_on_one_version(
                lambda adapter: self._engine.score(prompt, response, adapter), options
            )
            return ScoredResponse(logprobs=logprobs, version=version, adapter=adapter)
        requested = padded_token_ids(len(prompt), given) if given else None
        rows, version, adapter = await self._compute_on_one_version(
            lambda adapter: self._engine.top_logprobs(
                [*prompt, *response], options.top_logprobs, adapter, requested
            ),
            options,
        )
        return await _scored_response(rows[len(prompt) :], given, version, adapter)

    async def _compute_on_one_version(
        self, compute: Callable[[str | None], Awaitable[Result]], options: ScoringOptions
    ) -> tuple[Result, str, str | None]:
        """Run a computation on one weights version; repeat it if weights are activated meanwhile.

        Returns the result with the labels of the weights version and of the adapter that it used.
        """
        while True:
            await self._rollouts.wait_gate_open()
            self._versions.admit(options.weights)
            epoch, version = self._versions.epoch, self._versions.active.label
            with self._adapters.using(options.adapter) as adapter:
                result = await compute(adapter)
            if epoch == self._versions.epoch:
                check_finite(result, version)
                return result, version, adapter


def _check_logprobs(request: ScoreRequest, info: EngineInfo) -> None:
    """Check the requested logprobs of further tokens: shapes, token ids and total number."""
    given = [item for item in request.items if item.logprob_token_ids is not None]
    if request.top_logprobs and given:
        raise InvalidRequest("give either top_logprobs or logprob_token_ids")
    check_count(info, top_logprobs=request.top_logprobs)
    num_tokens = sum(len(response) for item in request.items for response in item.responses)
    check_total("top_logprobs", num_tokens, request.top_logprobs or 0)
    for item in given:
        _check_token_ids(item, info)
    check_total("logprob_token_ids", sum(map(_num_token_ids, given)), 1)


def _check_computed(top_logprobs: int, pairs: list[tuple[ScoreItem, list[int]]]) -> None:
    """Check the number of logprobs that the engine computes: at prompts, too, for each response."""
    total = 0
    for item, prompt in pairs:
        ks = [max(map(len, rows)) for rows in item.logprob_token_ids or ()]
        for index, response in enumerate(item.responses):
            total += (len(prompt) + len(response)) * (ks[index] if ks else top_logprobs)
    if total > MAX_COMPUTED_LOGPROBS:
        raise InvalidRequest(
            f"{total} logprobs of further tokens, at the positions of the prompts and of the "
            f"responses; a request may have at most {MAX_COMPUTED_LOGPROBS}: send fewer responses"
        )


def _check_token_ids(item: ScoreItem, info: EngineInfo) -> None:
    rows = item.logprob_token_ids or []
    if list(map(len, rows)) != list(map(len, item.responses)):
        raise InvalidRequest("logprob_token_ids needs one list per token of each response")
    widest = max(len(row) for of_response in rows for row in of_response)
    check_count(info, logprob_token_ids=widest)
    if max(max(row) for of_response in rows for row in of_response) >= info.vocab_size:
        raise InvalidRequest(f"token ids must be below {info.vocab_size}")


def _num_token_ids(item: ScoreItem) -> int:
    """Number of logprobs that the engine computes; it computes equally many at each position."""
    of_responses = item.logprob_token_ids or []
    return sum(len(rows) * max(map(len, rows)) for rows in of_responses)


async def _scored_response(
    rows: TopLogprobRows, given: list[list[int]] | None, version: str, adapter: str | None
) -> ScoredResponse:
    logprobs: list[float] = rows.logprobs[:, 0].tolist()
    if given is None:
        table = await to_table(rows)
        return ScoredResponse(
            logprobs=logprobs, version=version, adapter=adapter, top_logprobs=table
        )
    table = await asyncio.to_thread(given_table, rows, given)
    return ScoredResponse(logprobs=logprobs, version=version, adapter=adapter, given_logprobs=table)
