"""Engine client of vLLM's serving classes whose requests are started by the service."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import BaseRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams

from engine.openai_server.sample_outputs import (
    SampleOutputs,
    num_values,
    prompt_logprobs,
    request_output,
)
from engine.openai_server.sampling import check, sampling_fields
from engine.protocol.openai_server import (
    ApiCall,
    RunningSamples,
    SampleDelta,
    SampleEnd,
    SamplesRequest,
)
from engine.requests.images import ImageBudget
from engine.types.chat import ChatResponse

INLINE_VALUES = 2048
"""Number of tokens, or of logprobs, that are converted on the event loop, in some milliseconds."""
MAX_REPEATED_VALUES = 2**20
"""Maximum number of tokens and logprobs of prompts in a response, over all choices."""


class RolloutEngineClient:
    """The part of vLLM's EngineClient that its serving classes use, for one request of a caller.

    `generate` starts the samples at once, so that `wait_started` raises the service's errors before
    a streamed response begins. `ends` has the ends of the samples by the index of the choice. With
    `reports_texts`, the text of each sample is reported as its message. `has_large_result`: vLLM
    takes long to write the response.
    """

    errored = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        renderer: BaseRenderer,
        call: ApiCall,
        given: AbstractSet[str] = frozenset(),
        *,
        return_support: bool = False,
        echoes: bool = False,
        returns_text: bool = True,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer
        self.input_processor = None
        self.ends: dict[int, SampleEnd] = {}
        self.reports_texts = False
        self.images = ImageBudget(turns)
        self.has_large_result = False
        self._texts = defaultdict[int, list[str]](list)
        self._call = call
        self._given = given
        self._return_support = return_support
        self._returns_text = returns_text
        self._echoes = echoes
        self._num_repeated = 0
        self._starts: list[asyncio.Task[RunningSamples]] = []
        self._any_start = asyncio.Event()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """The service admits the samples when they are started."""

    def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        if prompt["type"] not in ("token", "multimodal"):
            raise VLLMValidationError("prompts of embeddings are not supported: send token ids")
        check(sampling_params)
        self.images.end_turn()
        # The engine checks constraints, in a process of their own.
        sampling_params.verify(self.model_config, None, None, self.renderer.tokenizer)
        token_ids = prompt["prompt_token_ids"]
        self._check_repetition(len(token_ids), sampling_params)
        if reasoning_ended is None and sampling_params.structured_outputs is not None:
            reasoning_ended = self._has_reasoning_end(token_ids, reasoning_parser_kwargs or {})
        request = SamplesRequest(
            prompt_token_ids=token_ids,
            n=sampling_params.n,
            sampling=sampling_fields(
                sampling_params,
                self._given,
                sets_max_tokens=not self._call.in_session,
                reasoning_ended=reasoning_ended,
            ),
            seed=sampling_params.seed,
            num_top_logprobs=sampling_params.logprobs,
            num_prompt_logprobs=sampling_params.prompt_logprobs,
            priority=priority,
            adapter=None if lora_request is None else lora_request.lora_name,
            cache_salt=prompt.get("cache_salt"),
            return_support=self._return_support,
            is_streamed=sampling_params.output_kind == RequestOutputKind.DELTA,
            returns_text=self._returns_text,
            multimodal_input=prompt if prompt["type"] == "multimodal" else None,
        )
        number, started = len(self._starts), asyncio.ensure_future(self._call.start(request))
        self._starts.append(started)
        self._any_start.set()
        return self._outputs(number, started, prompt, sampling_params)

    def _check_repetition(self, num_tokens: int, params: SamplingParams) -> None:
        """Refuse a small request whose response would repeat its prompts a thousand times."""
        per_token = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
        if self._echoes and params.n > 1:
            per_token = max(per_token, 1)
        self._num_repeated += num_tokens * params.n * per_token
        if self._num_repeated > MAX_REPEATED_VALUES:
            raise VLLMValidationError(
                f"the response would have more than {MAX_REPEATED_VALUES} tokens and logprobs of "
                "prompts over all choices: send fewer prompts, n: 1, or use POST /v1/score",
                parameter="echo" if self._echoes else "prompt_logprobs",
            )

    async def _outputs(
        self,
        number: int,
        started: "asyncio.Task[RunningSamples]",
        prompt: dict[str, Any],
        params: SamplingParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        streams = params.output_kind == RequestOutputKind.DELTA
        try:
            running = await started
        except Exception:
            if streams:  # `started_events` raises it, and closes this generator
                await asyncio.Event().wait()
            raise
        tokenizer = self.renderer.tokenizer
        block_size = self.vllm_config.cache_config.block_size
        samples = [
            SampleOutputs(tokenizer, params, index, detokenizes=self._returns_text)
            for index in range(params.n)
        ]
        of_prompt = prompt_logprobs(tokenizer, params, running.prompt_logprobs)
        of_samples = dict.fromkeys(range(params.n), of_prompt)
        finished = list[CompletionOutput]()
        async for delta in running.deltas():
            output, num_cached = await _output(samples, params, delta), delta.num_cached_tokens
            self._note(number * params.n + delta.index, delta, output)
            if not streams:
                finished.append(output)
                continue
            yield request_output(prompt, [output], of_samples[delta.index], num_cached, block_size)
            if of_prompt is not None:
                of_samples[delta.index] = []  # as vLLM, once for each sample
        if finished:
            finished.sort(key=lambda output: output.index)
            num_tokens = sum(len(output.token_ids) for output in finished)
            # vLLM writes the response in one step, which awaits nothing if it is of one prompt.
            self.has_large_result = num_tokens > INLINE_VALUES and len(self._starts) == 1
            yield request_output(prompt, finished, of_prompt, num_cached, block_size)

    def _note(self, choice: int, delta: SampleDelta, output: CompletionOutput) -> None:
        """Keep the end of a sample, and report its message."""
        if self.reports_texts:
            self._texts[delta.index].append(output.text)
        if delta.end is None:
            return
        self.ends[choice] = delta.end
        if self.reports_texts:
            message = ChatResponse(content="".join(self._texts.pop(delta.index)))
            self._call.on_message(delta.index, message)

    def _has_reasoning_end(self, token_ids: list[int], parser_kwargs: dict[str, Any]) -> bool:
        """True if the reasoning has ended in the prompt, as vLLM's engine finds out."""
        name = self.vllm_config.structured_outputs_config.reasoning_parser
        if not name:
            return True
        parser = ReasoningParserManager.get_reasoning_parser(name)
        return bool(parser(self.renderer.tokenizer, **parser_kwargs).is_reasoning_end(token_ids))

    async def wait_started(self) -> None:
        """Wait until the samples of all prompts so far are started; raises the service's errors."""
        await self._any_start.wait()
        await asyncio.gather(*self._starts)

    def close(self) -> None:
        """Cancel all samples that have not ended."""
        for started in self._starts:
            if not started.done():
                started.cancel()
            elif not started.cancelled() and started.exception() is None:
                started.result().cancel()

    @property
    def dead_error(self) -> Exception:
        raise AssertionError("the service reports a dead engine")


async def _output(
    samples: Sequence[SampleOutputs], params: SamplingParams, delta: SampleDelta
) -> CompletionOutput:
    """Output of a delta, in a thread if it is large."""
    sample = samples[delta.index]
    if num_values(params, delta) > INLINE_VALUES:
        return await asyncio.to_thread(sample.output, delta)
    return sample.output(delta)


async def started_events(
    events: AsyncGenerator[str, None], client: RolloutEngineClient
) -> AsyncGenerator[str, None]:
    """The events of a stream whose samples are started; raises the errors of their start."""
    started = asyncio.ensure_future(client.wait_started())
    early = list[str]()
    pending: asyncio.Future[str | None] | None = None
    try:
        while not started.done():
            pending = asyncio.ensure_future(anext(events, None))
            await asyncio.wait({pending, started}, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                break
            event, pending = pending.result(), None
            if event is None:  # vLLM has reported an error
                break
            early.append(event)
        if started.done():
            started.result()
    except BaseException:
        await _end(events, pending, client)
        raise
    finally:
        started.cancel()
    begun = _all_events(early, pending, events, client)
    await anext(begun)  # so that it is closed, and cancels the samples, also if nobody reads it
    return begun


async def _all_events(
    early: list[str],
    pending: "asyncio.Future[str | None] | None",
    events: AsyncGenerator[str, None],
    client: RolloutEngineClient,
) -> AsyncGenerator[str, None]:
    try:
        yield ""
        for event in early:
            yield event
        if pending is not None and (found := await pending) is not None:
            yield found
        async for event in events:
            yield event
    finally:
        await _end(events, pending, client)


async def _end(
    events: AsyncGenerator[str, None],
    pending: "asyncio.Future[str | None] | None",
    client: RolloutEngineClient,
) -> None:
    client.close()
    if pending is not None and not pending.done():
        pending.cancel()
        await asyncio.wait({pending})
    await events.aclose()
