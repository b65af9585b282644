"""Protocol of an engine's text methods: tokenizer, chat template, response parsers."""

from collections.abc import Sequence
from typing import Protocol

from engine.protocol.info_and_health import EngineState
from engine.types.chat import ChatRequest, ChatResponse
from engine.types.samples import Sampling

DEFAULT_SAMPLING = Sampling(max_tokens=1)


class ResponseStream(Protocol):
    """Incremental conversion of one sample's tokens to text. Use it from one thread at a time.

    `add` takes the next tokens and returns the text that they complete, never a part of a
    character. `finish` takes the last tokens of a sample that has ended, and returns what remains
    of its tool calls. `is_parsed`: parsers are applied, which may take milliseconds per call.
    `has_tool_calls`: tool calls are returned in parts; otherwise their text is not separated. A
    parser's failure is logged and never raised; nothing is returned after it.
    """

    @property
    def is_parsed(self) -> bool: ...

    @property
    def has_tool_calls(self) -> bool: ...

    def add(self, token_ids: Sequence[int]) -> ChatResponse: ...

    def finish(self, token_ids: Sequence[int], stop_reason: int | str | None) -> ChatResponse: ...


class Text(EngineState, Protocol):
    """Tokens of texts and chats, and texts and messages of tokens.

    token_texts: the text of each token alone, special tokens included.
    token_pieces: each token as written in the tokenizer's vocabulary.
    encode_chat: raises RequestRefused if the chat template does not render the request. Raises
        ConversationRefused if an option is an argument of the tokenizer or too large, or if the
        parsers do not accept the messages or tools. Raises PromptTooLong if the prompt does not fit
        into the context. No prompt is truncated or padded. The request is not modified.
    encode_chat_after: the tokens that the chat template puts after the assistant's message at
        `index`: its end, the messages after it and the generation prompt. They do not depend on the
        text of that message. `last_token` is the last token of the sample that the message was
        parsed from; a sample that has ended with an EOS token needs no other end. Raises as
        `encode_chat` does, and NoTurnEnd if the end of the message cannot be found.
    chat_response: parses a response to an encoded chat request with the configured parsers. Without
        a parser, the whole response is content. Tool calls are parsed only if the request has
        tools. The text is cut at the stop string that has ended the response. A parser's failure is
        logged and never raised.
    response_stream: converts a running sample's tokens as `decode` does, or as `chat_response`
        does if the chat request to which `prompt` was encoded is given. Text that may be the
        beginning of a stop string is held back. Tool calls are not parsed. A parser may split a
        part of a response differently from the whole.
    """

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, chat_request: ChatRequest) -> list[int]: ...

    def encode_chat_after(
        self, chat_request: ChatRequest, index: int, *, last_token: int
    ) -> list[int]: ...

    def chat_response(
        self,
        token_ids: Sequence[int],
        chat_request: ChatRequest,
        *,
        stop_reason: int | str | None = None,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> ChatResponse: ...

    def response_stream(
        self,
        sampling: Sampling = DEFAULT_SAMPLING,
        prompt: Sequence[int] = (),
        chat_request: ChatRequest | None = None,
    ) -> ResponseStream: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]: ...

    def token_pieces(self, token_ids: Sequence[int]) -> list[str]: ...
