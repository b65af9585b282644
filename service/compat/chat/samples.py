"""Samples of a chat request as chat messages, whole or streamed; shared by all chat APIs.

The chat routes of all APIs share them. A route module defines only its wire format.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from coppice.wire.rollouts import RolloutAnswer, SampleAnswer
from engine.types.chat import ChatRequest, ChatResponse
from engine.types.samples import Sampling
from service.compat import logprobs
from service.compat.answer_fields import usage
from service.compat.chat.forced_tools import ToolChoice, forced_response, is_forced
from service.compat.chat.streamed_message import StreamedMessage
from service.compat.request import CompatRequest
from service.compat.sample_stream import SamplePart
from service.errors import Internal, Overloaded
from service.rollouts.rollout import Rollout
from service.server import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSamples:
    """Samples of one chat request, which run as a rollout of one group.

    Without `parallel_tool_calls`, only the first tool call of a message is returned, as in vLLM.
    """

    call: CompatRequest
    chat_request: ChatRequest
    tool_choice: ToolChoice | None
    prompt: list[int]
    rollout: Rollout
    parallel_tool_calls: bool = True
    _call_ids: dict[tuple[int, int], str] = field(default_factory=dict)
    _num_reasoning_tokens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.call.set_parser(self._parse)

    @property
    def sampling(self) -> Sampling:
        return self.rollout.groups[0].options.sampling

    @property
    def parsed_request(self) -> ChatRequest:
        """The chat request as the parsers of the response need it."""
        if self.tool_choice == "none":
            return replace(self.chat_request, tools=())
        return self.chat_request

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens of the samples that are parsed."""
        return sum(self._num_reasoning_tokens.values())

    def usage(self, answer: RolloutAnswer) -> dict[str, Any]:
        """Token counts of a response whose samples are parsed."""
        details = {"reasoning_tokens": self.num_reasoning_tokens}
        return {**usage(answer), "completion_tokens_details": details}

    def check_ended(self, sample: SampleAnswer) -> None:
        """Raise a ServiceError for a sample that was aborted or failed.

        For APIs whose messages cannot express it; their clients repeat the request.
        """
        if sample.finish_reason == "error":
            raise Internal()
        if sample.finish_reason not in ("stop", "length"):
            raise Overloaded("the sample was aborted before its end: repeat the request")

    async def logprobs(self, sample: SampleAnswer, *, as_ids: bool) -> list[dict[str, Any]]:
        """Logprobs of all tokens of a sample, in OpenAI's chat format."""
        per_token = logprobs.sample_logprobs(self.rollout, 0, sample.index)
        name = await logprobs.token_names(
            self.call.server.tokenizer,
            lambda: logprobs.with_top_token_ids(sample.token_ids, per_token),
            as_ids=as_ids,
        )
        sampled = (sample.token_ids, sample.logprobs, per_token, name)
        return await asyncio.to_thread(logprobs.chat_logprobs, *sampled)

    async def message(self, sample: SampleAnswer) -> ChatResponse:
        """Parsed response of a sample that has ended; counted if a parser failed on it."""
        return self.counted(await self.parse(sample))

    async def parse(self, sample: SampleAnswer) -> ChatResponse:
        """Parsed response of a sample that has ended."""
        return await self.call.parsed(sample, self._parse)

    async def _parse(self, sample: SampleAnswer) -> ChatResponse:
        response = await self._parse_all(sample)
        self._num_reasoning_tokens[sample.index] = response.num_reasoning_tokens
        num_calls = len(response.tool_calls) if self.parallel_tool_calls else 1
        calls = enumerate(response.tool_calls[:num_calls])
        return replace(
            response,
            tool_calls=tuple(replace(c, id=self._id(sample.index, at, c.id)) for at, c in calls),
        )

    def identified(self, index: int, part: ChatResponse) -> ChatResponse:
        """A part of the message of a sample with the ids of its tool calls."""
        parts = tuple(
            replace(each, id=each.id and self._id(index, each.index, each.id))
            for each in part.tool_call_parts
        )
        return replace(part, tool_call_parts=parts)

    def _id(self, sample: int, call: int, given: str) -> str:
        """Id of a tool call: the first that was given to it, in a part or in the whole message."""
        return self._call_ids.setdefault((sample, call), given)

    async def _parse_all(self, sample: SampleAnswer) -> ChatResponse:
        tokenizer = self.call.server.tokenizer
        if is_forced(self.tool_choice):
            return await tokenizer.parsed_text(
                sample.token_ids,
                sample.stop_reason,
                self.sampling,
                partial(forced_response, self.tool_choice),
            )
        return await tokenizer.chat_response(
            self.parsed_request, sample.token_ids, sample.stop_reason, self.sampling
        )

    def counted(self, response: ChatResponse) -> ChatResponse:
        if not response.parsed:
            self.call.server.metrics.http.responses_not_parsed.inc()
        return response


def count_ignored_options(
    server: Server, given: Mapping[str, Any], derived: Mapping[str, Any] | None = None
) -> None:
    """Count in the metrics the options that the chat template does not use.

    They are not rejected: clients send `enable_thinking` to every model, and vLLM also ignores
    options that a template lacks. The options `derived` from one field of a request are spellings
    of different templates: they count as one if the template has none of them.
    """
    variables = server.engine.info.template_variables
    num_ignored = len(given.keys() - variables)
    if derived and not derived.keys() & variables:
        num_ignored += 1
    server.metrics.http.compat_fields.labels("unknown").inc(num_ignored)


class MessageParts:
    """Parts of the messages of streamed samples.

    A message with a forced tool call is returned as a whole when its sample has ended, and so is
    one that may call tools if the parser of the tool calls has no parts that agree with the whole,
    or with `buffers_tool_calls`.
    """

    def __init__(self, samples: ChatSamples, *, buffers_tool_calls: bool = False) -> None:
        self._samples = samples
        self._buffers_tool_calls = buffers_tool_calls
        self._messages: dict[int, StreamedMessage] = {}

    def is_first(self, part: SamplePart) -> bool:
        """True if no part of the sample was passed to `next` yet."""
        return part.index not in self._messages

    async def next(self, part: SamplePart) -> ChatResponse:
        """Reasoning, content and tool calls that a part of a sample adds to its message."""
        message = self._messages.get(part.index) or await self._start(part)
        if part.sample is None:
            return self._samples.identified(part.index, await message.next(part))
        del self._messages[part.index]
        whole = await self._samples.parse(part.sample)
        return self._samples.counted(await message.last(part, whole))

    async def _start(self, part: SamplePart) -> StreamedMessage:
        samples, tokenizer = self._samples, self._samples.call.server.tokenizer
        request = samples.parsed_request
        stream = await tokenizer.response_stream(samples.prompt, request, samples.sampling)
        has_parts = stream.has_tool_calls and not self._buffers_tool_calls
        has_text_of_calls = stream.is_parsed and request.tools and not has_parts
        message = self._messages[part.index] = StreamedMessage(
            tokenizer,
            stream,
            is_buffered=is_forced(samples.tool_choice) or bool(has_text_of_calls),
            parallel=samples.parallel_tool_calls,
        )
        return message
