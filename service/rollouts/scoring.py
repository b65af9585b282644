"""Teacher-forced logprobs of given responses, each computed on one weights version.

vLLM may prefill a long prompt in chunks, and an activation between two chunks would mix versions
undetected. A computation that spans an activation is therefore repeated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from coppice.wire.rollouts import WeightsConstraint
from coppice.wire.score import ScoreAnswer, ScoredItem, ScoredResponse, ScoreItem, ScoreRequest
from engine.protocol import Engine
from engine.types import TopLogprobs
from service.adapters.manager import AdapterManager
from service.http.errors import InvalidRequest, PromptTooLong
from service.http.exception_handlers import to_service_error
from service.rollouts.admission import Admission
from service.rollouts.manager import RolloutManager
from service.rollouts.tokenizer import Tokenizer
from service.weights.versions import Versions

Result = TypeVar("Result")
ComputedResult: TypeAlias = Coroutine[Any, Any, tuple[Result, str, str | None]]


class ScoringOptions(NamedTuple):
    """Weights constraint and adapter of a scoring request, common to all its responses."""

    weights: WeightsConstraint | None
    adapter: str | None


class Scoring:
    """Computes logprobs of given responses and prompts; keeps no state between requests."""

    def __init__(
        self,
        engine: Engine,
        versions: Versions,
        tokenizer: Tokenizer,
        rollouts: RolloutManager,
        adapters: AdapterManager,
        *,
        admission: Admission,
        max_samples_per_request: int,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._tokenizer = tokenizer
        self._rollouts = rollouts
        self._adapters = adapters
        self._admission = admission
        self._max_samples = max_samples_per_request

    async def score(self, request: ScoreRequest, *, owner: str) -> ScoreAnswer:
        num_responses = sum(len(item.responses) for item in request.items)
        if num_responses > self._max_samples:
            raise InvalidRequest(
                f"{num_responses} responses; the limit is {self._max_samples} per request"
            )
        prompts = await self._tokenizer.all_token_ids([item.prompt for item in request.items])
        pairs = list(zip(request.items, prompts, strict=True))
        for item, prompt in pairs:
            self._check(prompt, item.responses)
        num_tokens = sum(len(p) + sum(map(len, item.responses)) for item, p in pairs)
        with self._admission.reserved(owner, samples=num_responses, prompt_tokens=num_tokens):
            return await self._score_items(pairs, ScoringOptions(request.weights, request.adapter))

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
        async with asyncio.TaskGroup() as tasks:
            scored = [
                tasks.create_task(self._response(prompt, response, options))
                for response in item.responses
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
    ) -> list[list[TopLogprobs]]:
        """Top-k logprobs at the positions of each given prompt, in the order of the prompts.

        Each prompt is computed on one weights version.
        """
        for prompt in prompts:
            self._check(prompt, [])

        def score_prompt(prompt: list[int]) -> ComputedResult[list[TopLogprobs]]:
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
        self, prompt: list[int], response: list[int], options: ScoringOptions
    ) -> ScoredResponse:
        logprobs, version, adapter = await self._compute_on_one_version(
            lambda adapter: self._engine.score(prompt, response, adapter), options
        )
        return ScoredResponse(logprobs=logprobs, version=version, adapter=adapter)

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
                return result, version, adapter
