"""Generation requests to vLLM: samples, scores and aborts, in the service's process.

Each sample is one request with n=1, as in vLLM's own fan-out of larger n. So each sample can be
aborted, versioned and drafted separately. Siblings share their prompt's KV through prefix caching.
They are submitted in one iteration of the event loop so that they are scheduled together.
"""

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.structured_output.utils import choice_as_grammar

from engine.errors import EngineDead, RequestRefused, SupportLost
from engine.io import logprob_arrays, stop_strings
from engine.io.logprobs import (
    given_logprobs,
    prompt_logprobs,
    sampled_logprobs,
    top_k_entropies,
)
from engine.io.sampling_checks import XGRAMMAR, bad_word_ids
from engine.io.stop_strings import PRIOR_TEXT_ARG
from engine.kv_types import KvTransferParams
from engine.launch.processes import VllmProcesses
from engine.launch.sampling_hooks import PRIOR_TOKENS_ARG
from engine.runner.routed_experts import ROUTED_EXPERTS_ARG
from engine.sampling_support.step import SUPPORT_ARG, rows_of
from engine.speculation.request_table import GROUP_ARG, NO_DRAFTS_ARG
from engine.types import (
    Completion,
    SampleRequest,
    StructuredOutputs,
    TokenDelta,
    TopLogprobRows,
    VersionSpan,
)
from engine.weights.updates import LoadedAdapters

Value = TypeVar("Value")


class RequestParams(SamplingParams):  # type: ignore[misc]  # vLLM's types are not followed
    """SamplingParams of a sample, which vLLM accepts also together with speculation.

    vLLM refuses `min_p` and `logit_bias` if the engine drafts, and masks end-of-sequence tokens too
    long if drafts pass the end of `min_tokens`. Here a sample with one of them gets no drafts
    (`find_skip_reason`), so its tokens come from the ordinary sampler. What vLLM validates for each
    sample is validated once per request instead, outside the event loop.
    """

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        pass

    def _validate_structured_outputs(self, model: Any, config: Any, tokenizer: Any) -> None:
        """Set the backend only, because `SamplingChecks` has validated the constraint before."""
        if config.backend != XGRAMMAR:
            super()._validate_structured_outputs(model, config, tokenizer)
        elif self.structured_outputs is not None:
            self.structured_outputs._backend = XGRAMMAR

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        if self.bad_words:
            self._bad_words_token_ids = bad_word_ids(tuple(self.bad_words), tokenizer)


def sampling_params(sample: SampleRequest, max_context_tokens: int) -> SamplingParams:
    """Convert a sample request to vLLM's SamplingParams.

    Fields are copied one by one, so no other field of a request reaches vLLM. `max_context_tokens`
    may be smaller than vLLM's own limit.
    """
    sampling = sample.sampling
    max_response_tokens = max_context_tokens - len(sample.prompt_token_ids)
    if max_response_tokens < 1:
        raise RequestRefused(
            f"the prompt must be shorter than the context of {max_context_tokens} tokens"
        )
    max_tokens = min(sampling.max_tokens, max_response_tokens)
    return RequestParams(
        n=1,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=_as_list(sampling.allowed_token_ids),
        bad_words=list(sampling.bad_words),
        structured_outputs=_structured_outputs(sampling.structured_outputs),
        seed=sample.seed,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        ignore_eos=sampling.ignore_eos,
        logprobs=max(sample.entropy_top_k, sample.num_top_logprobs),
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=_output_kind(sample),
        skip_clone=True,  # not shared
        extra_args=_extra_args(sample),
        routed_experts_prompt_start=sample.experts_from or 0,
    )


def _structured_outputs(wanted: StructuredOutputs | None) -> StructuredOutputsParams | None:
    if wanted is None:
        return None
    return StructuredOutputsParams(
        json=wanted.json,
        regex=wanted.regex,
        grammar=wanted.grammar if wanted.choice is None else choice_as_grammar(wanted.choice),
        json_object=wanted.json_object,
        structural_tag=wanted.structural_tag,
    )


def _as_list(values: Sequence[Value] | None) -> list[Value] | None:
    return None if values is None else list(values)


def _output_kind(sample: SampleRequest) -> RequestOutputKind:
    """FINAL_ONLY, or CUMULATIVE for a sample whose tokens are delivered while it runs.

    Cumulative outputs refer to vLLM's own lists, so that they cost no copy, and an output that is
    not read in time is replaced. vLLM's merge of two DELTA outputs would lose the ranks of tokens
    that are both sampled and among the top k.
    """
    if sample.on_tokens is None:
        return RequestOutputKind.FINAL_ONLY
    return RequestOutputKind.CUMULATIVE


def _extra_args(sample: SampleRequest) -> dict[str, Any] | None:
    """`extra_args` of a sample's SamplingParams. No request can set `kv_transfer_params`."""
    carried: dict[str, Any] = {}
    if sample.group is not None:
        carried[GROUP_ARG] = sample.group
    if not sample.speculation:
        carried[NO_DRAFTS_ARG] = True
    if sample.support:
        carried[SUPPORT_ARG] = True
    if sample.num_prior_tokens and sample.sampling.depends_on_response:
        carried[PRIOR_TOKENS_ARG] = sample.num_prior_tokens
    if sample.num_prior_tokens and sample.sampling.stop:
        carried[PRIOR_TEXT_ARG] = sample.num_prior_tokens
    if sample.export is not None:
        num_tokens, length = sample.export.num_tokens, len(sample.prompt_token_ids)
        assert 0 < num_tokens <= length, f"{num_tokens} of {length} tokens cannot be exported"
    assert sample.load is None or sample.load.pieces, "there is something to load"
    if sample.export is not None or sample.load is not None:
        params = KvTransferParams(export=sample.export, load=sample.load)
        carried["kv_transfer_params"] = params.to_dict()
    if sample.experts_from is not None:
        carried[ROUTED_EXPERTS_ARG] = True
    return carried or None


class PendingSample:
    """Awaitable of a running sample. Unlike a coroutine, it may be dropped without being awaited.

    `on_finished` receives the completion, including the top k tokens if they were recorded.
    """

    def __init__(
        self,
        queue: Any,
        sample: SampleRequest,
        progress: Callable[[], tuple[VersionSpan, ...]],
        on_finished: Callable[[Completion], None] | None = None,
    ) -> None:
        self._queue = queue
        self._progress = progress
        self._sample = sample
        self._num_delivered = 0
        self._on_finished = on_finished

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._completion().__await__()

    async def _completion(self) -> Completion:
        try:
            while not (output := await self._queue.get()).finished:
                self._deliver(output)
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        found = to_completion(output, self._sample)
        if self._on_finished is not None:
            self._on_finished(
                replace(found, top_logprobs=_recorded_rows(output.outputs[0].logprobs))
            )
        return found

    def _deliver(self, output: RequestOutput) -> None:
        """Pass the new tokens of a running sample to `on_tokens`."""
        start, (sample,) = self._num_delivered, output.outputs
        end = self._num_delivered = len(sample.token_ids)
        if self._sample.on_tokens is None or end == start:
            return
        flat: Any = sample.logprobs
        flat = flat[start:end]
        delta = TokenDelta(
            start=start,
            token_ids=list(sample.token_ids[start:end]),
            logprobs=sampled_logprobs(flat),
            versions=_spans_between(self._progress(), start, end),
            top_logprobs=_top_logprobs(flat, self._sample),
        )
        self._sample.on_tokens(delta)


def _recorded_rows(logprobs: Any) -> TopLogprobRows | None:
    """Top logprobs of a sample, if vLLM returned any for whatever purpose."""
    return logprobs.rows() if isinstance(logprobs, logprob_arrays.LogprobChunks) else None


def _top_logprobs(logprobs: Any, request: SampleRequest) -> TopLogprobRows | None:
    rows, k = _recorded_rows(logprobs), request.num_top_logprobs
    return rows.columns(k) if k and rows is not None else None


def to_completion(output: RequestOutput, request: SampleRequest) -> Completion:
    sample, k = output.outputs[0], request.entropy_top_k
    rows = _recorded_rows(sample.logprobs)
    return Completion(
        token_ids=list(sample.token_ids),
        logprobs=sampled_logprobs(sample.logprobs),
        finish=sample.finish_reason,
        versions=tuple(
            VersionSpan(version=span.version, start=span.start, end=span.end)
            for span in sample.weight_versions or ()
        ),
        num_cached_tokens=output.num_cached_tokens or 0,
        stop_reason=sample.stop_reason,
        entropy=top_k_entropies(rows, k) if k and rows is not None else None,
        top_logprobs=_top_logprobs(sample.logprobs, request),
        support=_support(sample) if request.support else None,
        routed_experts=sample.routed_experts,
    )


def _spans_between(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(version=span.version, start=max(span.start, start), end=min(span.end, end))
        for span in spans
        if span.start < end and span.end > start
    )


def _support(sample: Any) -> list[bytes]:
    """Encoded supports of a sample's tokens. Raises SupportLost if the engine lacks them."""
    rows = rows_of(sample.sampling_mask or ())
    if len(rows) != len(sample.token_ids):
        raise SupportLost(f"{len(rows)} supports for {len(sample.token_ids)} tokens")
    return rows


def version_spans_so_far(state: RequestState) -> tuple[VersionSpan, ...]:
    """Version spans of a running request's tokens; vLLM itself reports them only at the end."""
    if state.detokenizer is None:
        return ()
    starts = state.weight_version_starts
    ends = [start for _, start in starts[1:]] + [state.detokenizer.num_output_tokens()]
    return tuple(
        VersionSpan(version=version, start=start, end=end)
        for (version, start), end in zip(starts, ends, strict=bool(starts))
    )


class Generation:
    """Generates samples and scores responses with the running vLLM."""

    def __init__(self, processes: VllmProcesses, adapters: LoadedAdapters) -> None:
        logprob_arrays.install()
        self._processes = processes
        self._adapters = adapters
        stop_strings.install()

    async def warm_up(self, eos_token_ids: Sequence[int]) -> None:
        """Generate once, because vLLM compiles for seconds in its first generation."""
        token = eos_token_ids[0] if eos_token_ids else 0
        params = SamplingParams(
            max_tokens=4, top_p=0.9, top_k=20, ignore_eos=True, logprobs=0, detokenize=False
        )
        prompt = tokens_input([token] * 4)
        async for _ in self._processes.llm.generate(prompt, params, "warm-up"):
            pass

    async def submit(
        self,
        samples: Sequence[SampleRequest],
        max_context_tokens: int,
        on_finished: Callable[[SampleRequest, Completion], None] | None,
    ) -> list[Awaitable[Completion]]:
        try:
            return [
                await self._submit_one(sample, max_context_tokens, on_finished)
                for sample in samples
            ]
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        except (VLLMClientError, ValueError, RequestRefused) as error:
            await self.abort([sample.id for sample in samples])
            raise RequestRefused(str(error)) from error

    async def _submit_one(
        self,
        sample: SampleRequest,
        max_context_tokens: int,
        on_finished: Callable[[SampleRequest, Completion], None] | None,
    ) -> PendingSample:
        queue = await self._processes.llm.add_request(
            sample.id,
            tokens_input(list(sample.prompt_token_ids), cache_salt=sample.cache_salt),
            sampling_params(sample, max_context_tokens),
            lora_request=self._adapters.request(sample.adapter),
            priority=sample.priority,
        )
        return PendingSample(
            queue,
            sample,
            partial(self._spans, sample.id),
            partial(on_finished, sample) if on_finished else None,
        )

    def progress(self, sample_ids: Sequence[str]) -> list[tuple[VersionSpan, ...]]:
        return [self._spans(sample_id) for sample_id in sample_ids]

    def _spans(self, sample_id: str) -> tuple[VersionSpan, ...]:
        processor = self._processes.llm.output_processor
        [internal_id] = processor.external_req_ids.get(sample_id) or [""]
        state = processor.request_states.get(internal_id)
        return () if state is None else version_spans_so_far(state)

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None
    ) -> list[float]:
        rows = await self.top_logprobs([*prompt, *response], 0, adapter)
        logprobs: list[float] = rows.logprobs[len(prompt) :, 0].tolist()
        return logprobs

    async def top_logprobs(
        self, prompt: Sequence[int], num_top_logprobs: int, adapter: str | None
    ) -> TopLogprobRows:
        lora_request = self._adapters.request(adapter)
        return await prompt_logprobs(self._processes.llm, prompt, lora_request, num_top_logprobs)

    async def given_logprobs(
        self, prompt: Sequence[int], given: NDArray[np.int32], adapter: str | None
    ) -> TopLogprobRows:
        lora_request = self._adapters.request(adapter)
        return await given_logprobs(self._processes.llm, prompt, lora_request, given)

    async def abort(self, sample_ids: Sequence[str]) -> None:
        with suppress(EngineDead, EngineDeadError):
            await self._processes.llm.abort(list(sample_ids))
