"""Incremental detokenization of running samples, by vLLM's detokenizer and reasoning parsers."""

import logging
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from engine.protocol import DEFAULT_SAMPLING
from engine.types import ChatResponse, Sampling

log = logging.getLogger(__name__)
NOTHING = ChatResponse(content=None, parsed=False)


class TextStream:
    """`engine.protocol.ResponseStream` that returns all text as content.

    The detokenizer holds back the bytes of an incomplete character, and as many characters as may
    be the beginning of a stop string. It does not see the prompt, as `Engine.decode` does not.
    """

    is_parsed = False

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

    def text(self, token_ids: Sequence[int]) -> str:
        self._detokenizer.update(list(token_ids), stop_terminated=False)
        return str(self._detokenizer.get_next_output_text(finished=False, delta=True))


class ParsedStream:
    """`engine.protocol.ResponseStream` that separates reasoning from content.

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
    ) -> None:
        self._text = TextStream(
            tokenizer, sampling, skip_special_tokens=request.skip_special_tokens
        )
        self._parser = parser
        self._request = request
        self._prompt = list(prompt)
        self._failed = False

    def add(self, token_ids: Sequence[int]) -> ChatResponse:
        if self._failed:
            return NOTHING
        try:
            message = self._parse(self._text.text(token_ids), list(token_ids))
        # Models may generate malformed text; the whole response is parsed again at its end.
        except Exception as error:
            log.warning("a running response could not be parsed: %s", type(error).__name__)
            self._failed = True
            return NOTHING
        if message is None:
            return ChatResponse(content=None)
        return ChatResponse(content=message.content, reasoning=message.reasoning)

    def _parse(self, text: str, token_ids: list[int]) -> Any:
        return self._parser.parse_delta(
            text, token_ids, self._request, prompt_token_ids=self._prompt, finished=False
        )


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
