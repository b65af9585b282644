"""Streaming of a running sample as message deltas, by vLLM's detokenizer and parsers."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from engine.protocol.text import DEFAULT_SAMPLING
from engine.requests.response_parsers import tool_call_part
from engine.types.chat import ChatResponse, ToolCallPart
from engine.types.samples import Sampling

log = logging.getLogger(__name__)
NOTHING = ChatResponse(content=None, parsed=False)
MIN_GROWTH = 256
"""A message with tools is parsed when it has grown by one part in this many.

vLLM's tool parsers read the whole message at each call, so that calls per token would take time
quadratic in its length. Messages of fewer tokens are parsed at each token.
"""
Decode = Callable[[Sequence[int], int | str | None], str]
"""Text of a sample that has ended: decoded, and cut at the stop string that is its stop reason."""


class TextStream:
    """`engine.protocol.text.ResponseStream` that returns all text as content.

    The detokenizer holds back the bytes of an incomplete character, and as many characters as may
    be the beginning of a stop string. It does not see the prompt, as `Engine.decode` does not.
    """

    is_parsed = False
    has_tool_calls = False

    def __init__(
        self,
        tokenizer: Any,
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        skip = skip_special_tokens and sampling.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer.from_new_request(
            tokenizer, _request(sampling, skip_special_tokens=skip)
        )

    def add(self, token_ids: Sequence[int]) -> ChatResponse:
        return ChatResponse(content=self.text(token_ids))

    def finish(self, token_ids: Sequence[int], stop_reason: int | str | None) -> ChatResponse:
        return ChatResponse(content=None)

    def text(self, token_ids: Sequence[int]) -> str:
        self._detokenizer.update(list(token_ids), stop_terminated=False)
        return str(self._detokenizer.get_next_output_text(finished=False, delta=True))


class ParsedStream:
    """`engine.protocol.text.ResponseStream` that separates reasoning, content and tool calls.

    `parser` and `request` are vLLM's; `prompt` tells the parser whether reasoning has begun.
    """

    is_parsed = True

    def __init__(
        self,
        tokenizer: Any,
        sampling: Sampling,
        parser: Any,
        request: Any,
        prompt: Sequence[int],
        decode: Decode,
        *,
        has_tool_calls: bool = False,
    ) -> None:
        self._text = TextStream(
            tokenizer, sampling, skip_special_tokens=request.skip_special_tokens
        )
        self._parser = parser
        self._request = request
        self._prompt = list(prompt)
        self._decode = decode
        self.has_tool_calls = has_tool_calls
        self._failed = False
        self._token_ids: list[int] = []
        self._num_parsed = 0
        self._parsed_text: list[str] = []

    def add(self, token_ids: Sequence[int]) -> ChatResponse:
        self._token_ids += token_ids
        num_new = len(self._token_ids) - self._num_parsed
        if self.has_tool_calls and num_new <= self._num_parsed // MIN_GROWTH:
            return ChatResponse(content=None)
        return self._guarded(lambda new: self._parse(self._text.text(new), new, finished=False))

    def finish(self, token_ids: Sequence[int], stop_reason: int | str | None) -> ChatResponse:
        self._token_ids += token_ids

        def parse(new: list[int]) -> Any:
            whole, parsed = self._decode(self._token_ids, stop_reason), "".join(self._parsed_text)
            if not whole.startswith(parsed):
                raise ValueError("the text of the response does not begin with that of its parts")
            return self._parse(whole[len(parsed) :], new, finished=True)

        return self._guarded(parse)

    def _guarded(self, parse: Callable[[list[int]], Any]) -> ChatResponse:
        """Result of `parse` for the tokens that are not parsed yet; nothing after a failure."""
        new, self._num_parsed = self._token_ids[self._num_parsed :], len(self._token_ids)
        if self._failed:
            return NOTHING
        try:
            return _response(parse(new))
        # Models may generate malformed text; the whole response is parsed again at its end.
        except Exception as error:
            log.warning("a running response could not be parsed: %s", type(error).__name__)
            self._failed = True
            return NOTHING

    def _parse(self, text: str, token_ids: list[int], *, finished: bool) -> Any:
        self._parsed_text.append(text)
        return self._parser.parse_delta(
            text, token_ids, self._request, prompt_token_ids=self._prompt, finished=finished
        )


def _response(message: Any) -> ChatResponse:
    """A part of a response from vLLM's `DeltaMessage`; None if it adds nothing."""
    if message is None:
        return ChatResponse(content=None)
    return ChatResponse(
        content=message.content,
        reasoning=message.reasoning,
        tool_call_parts=_one_part_per_call(map(tool_call_part, message.tool_calls or ())),
    )


def _one_part_per_call(parts: Iterable[ToolCallPart]) -> tuple[ToolCallPart, ...]:
    """The parts with those of the same call joined.

    vLLM's parsers return the name and the arguments of a call that arrives at once as two parts,
    and some clients read only the first part of a chunk.
    """
    joined: list[ToolCallPart] = []
    for part in parts:
        if joined and joined[-1].index == part.index and part.name is None:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + part.arguments)
        else:
            joined.append(part)
    return tuple(joined)


def _request(sampling: Sampling, *, skip_special_tokens: bool) -> EngineCoreRequest:
    """The request without a prompt that vLLM's detokenizer reads its options from."""
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=[],
        mm_features=None,
        sampling_params=SamplingParams(
            max_tokens=None,
            stop=list(sampling.stop),
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=skip_special_tokens,
        ),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
