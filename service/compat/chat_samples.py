"""Samples of a chat request and their messages: whole, or in parts as tokens are sampled.

The chat routes of all APIs share them. A route module defines only its wire format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coppice.wire.rollouts import SampleAnswer
from engine.types import ChatRequest, ChatResponse, Sampling
from service.compat.compat_request import CompatRequest
from service.compat.forced_tools import ToolChoice, forced_response, is_forced
from service.compat.sample_stream import SamplePart, StreamedMessage
from service.http.errors import Internal, Overloaded
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

    def check_ended(self, sample: SampleAnswer) -> None:
        """Raise a ServiceError for a sample that was aborted or failed.

        For APIs whose messages cannot express it; their clients repeat the request.
        """
        if sample.finish_reason == "error":
            raise Internal()
        if sample.finish_reason not in ("stop", "length"):
            raise Overloaded("the sample was aborted before its end: repeat the request")

    async def message(self, sample: SampleAnswer) -> ChatResponse:
        """Parsed response of a sample that has ended; counted if a parser failed on it."""
        return self.counted(await self.parse(sample))

    async def parse(self, sample: SampleAnswer) -> ChatResponse:
        """Parsed response of a sample that has ended."""
        return await self.call.parsed(sample, self._parse)

    async def _parse(self, sample: SampleAnswer) -> ChatResponse:
        response = await self._parse_all(sample)
        if self.parallel_tool_calls or len(response.tool_calls) < 2:
            return response
        return replace(response, tool_calls=response.tool_calls[:1])

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

    A message that may contain tool calls is returned as a whole when its sample has ended: the
    parsers of tool calls give the result of the whole text only then.
    """

    def __init__(self, samples: ChatSamples) -> None:
        self._samples = samples
        self._messages: dict[int, StreamedMessage] = {}
        self._is_buffered = False

    def is_first(self, part: SamplePart) -> bool:
        """True if no part of the sample was passed to `next` yet."""
        return part.index not in self._messages

    async def next(self, part: SamplePart) -> ChatResponse:
        """Reasoning, content and tool calls that a part of a sample adds to its message."""
        message = self._messages.get(part.index) or await self._start(part)
        if part.sample is not None:
            del self._messages[part.index]
            whole = await self._samples.parse(part.sample)
            return self._samples.counted(message.rest(whole))
        if self._is_buffered:
            return ChatResponse(content=None)
        return await message.next(part)

    async def _start(self, part: SamplePart) -> StreamedMessage:
        samples, server = self._samples, self._samples.call.server
        request = samples.parsed_request
        stream = await server.tokenizer.response_stream(samples.prompt, request, samples.sampling)
        may_call = stream.is_parsed and bool(request.tools)
        self._is_buffered = is_forced(samples.tool_choice) or may_call
        message = self._messages[part.index] = StreamedMessage(server, stream)
        return message
