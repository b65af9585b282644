"""Protocols of the OpenAI server: vLLM's serving classes, which call the service to generate.

The server parses a request, renders its prompt and writes its response. It knows no limits, keys,
versions or sessions: it asks the `ApiCall` of the service for samples, and gets their tokens.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from engine.types.chat import ChatRequest, ChatResponse, TruncationSide
from engine.types.samples import TopLogprobRows

Api = Literal[
    "chat/completions",
    "completions",
    "responses",
    "messages",
    "messages/count_tokens",
    "generate",
    "tokenize",
    "detokenize",
]
"""Route of the server, without its prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRequest:
    """Samples of one prompt. `sampling` has the parameters that the request has set.

    `sampling` has the names of vLLM's SamplingParams. `multimodal_input` is vLLM's engine input of
    a prompt with images or other media.
    """

    prompt_token_ids: list[int]
    n: int
    sampling: Mapping[str, Any]
    seed: int | None
    num_top_logprobs: int | None
    num_prompt_logprobs: int | None
    priority: int
    adapter: str | None
    cache_salt: str | None
    return_support: bool
    is_streamed: bool
    returns_text: bool
    multimodal_input: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEnd:
    """End of a sample. `versions` and `support` are in the form of the native answers."""

    finish_reason: str
    stop_reason: int | str | None
    versions: Sequence[Mapping[str, Any]]
    support: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    """Tokens that a sample has generated since its last delta, and the text that they complete.

    The last one has the sample's end. `text` is None if it is not known, or was not requested.
    """

    index: int
    token_ids: Sequence[int]
    num_cached_tokens: int
    logprobs: Sequence[float]
    text: str | None
    top_logprobs: TopLogprobRows | None = None
    end: SampleEnd | None = None


class RunningSamples(Protocol):
    """Samples of one prompt that have been started.

    prompt_logprobs: if they were requested.
    deltas: raises what has ended the samples early. It may be called once.
    cancel: called when the response ends, however it ends.
    """

    @property
    def prompt_logprobs(self) -> TopLogprobRows | None: ...

    def deltas(self) -> AsyncIterator[SampleDelta]: ...

    def cancel(self) -> None: ...


class StoredResponse(Protocol):
    """A response of the Responses API and its messages without instructions, as JSON."""

    @property
    def response(self) -> bytes: ...

    @property
    def messages(self) -> bytes: ...


class ApiCall(Protocol):
    """One request to the OpenAI server, as the service runs it.

    in_session: its prompts come from `chat_prompt` and `text_prompt`, and `on_message` gets the
        messages that the caller receives, in any thread.
    serves: True if a model name denotes the served model.
    has_adapter: True if it denotes a LoRA adapter.
    start: raises the errors of the service.
    stored_response: a response that the same caller has stored, for `previous_response_id`.
    """

    @property
    def in_session(self) -> bool: ...

    def serves(self, model: str) -> bool: ...

    def has_adapter(self, model: str) -> bool: ...

    async def chat_prompt(self, chat_request: ChatRequest) -> list[int]: ...

    async def text_prompt(
        self,
        prompt: str | list[int],
        *,
        truncate_prompt_tokens: int | None = None,
        truncation_side: TruncationSide = "left",
    ) -> list[int]: ...

    async def start(self, request: SamplesRequest) -> RunningSamples: ...

    def on_message(self, index: int, message: ChatResponse) -> None: ...

    def stored_response(self, response_id: str) -> StoredResponse | None: ...

    def store_response(self, response_id: str, response: bytes, messages: bytes) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiResponse:
    """Response of the server: JSON, or a stream of server-sent events."""

    status: int = 200
    content: bytes = b""
    events: AsyncGenerator[str, None] | None = None


class OpenAIServer(Protocol):
    """OpenAI's, Anthropic's and vLLM's APIs, with the responses of vLLM's server.

    parse: a request of a body in JSON, or the response to one that is not valid. It may run in any
        thread. A `request_id` replaces the one of the body.
    schemas: JSON schemas of the requests by API, and of what they refer to under
        #/components/schemas by name. Takes seconds; it may run in any thread.
    respond: cancels the samples when it is cancelled, or when the stream is closed. The errors of
        their start are raised, also those of a stream.
    """

    def parse(self, api: Api, body: Mapping[str, Any], request_id: str | None = None) -> Any: ...

    def schemas(self) -> tuple[Mapping[Api, Any], Mapping[str, Any]]: ...

    async def respond(self, request: Any, call: ApiCall) -> ApiResponse: ...
