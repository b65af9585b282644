"""Protocol of an engine's text methods: tokenizer, chat template, response parsers."""

from collections.abc import Sequence
from typing import Protocol

from engine.protocol.info_and_health import EngineState
from engine.protocol.openai_server import OpenAIServer
from engine.types.chat import ChatRequest, ChatResponse, EncodedPrompt
from engine.types.samples import Sampling

DEFAULT_SAMPLING = Sampling(max_tokens=1)


class Text(EngineState, Protocol):
    """Tokens of texts and chats, and texts and messages of tokens.

    encode_chat: raises RequestRefused if the chat template does not render the request. Raises
        ConversationRefused if an option is an argument of the tokenizer or too large, or if the
        parsers do not accept the messages or tools. Raises PromptTooLong if the prompt does not fit
        into the context. No prompt is truncated or padded. The request is not modified.
    encode_chat_with_images: as `encode_chat`, for messages with images, which that refuses. The
        prompt may be too long.
    encode_chat_after: the tokens that the chat template puts after the assistant's message at
        `index`: its end, the messages after it and the generation prompt. They do not depend on the
        text of that message. `last_token` is the last token of the sample that the message was
        parsed from; a sample that has ended with an EOS token needs no other end. Raises as
        `encode_chat` does, and NoTurnEnd if the end of the message cannot be found.
    chat_response: parses a response to an encoded chat request with the configured parsers. Without
        a parser, the whole response is content. Tool calls are parsed only if the request has
        tools. The text is cut at the stop string that has ended the response. A parser's failure is
        logged and never raised.
    """

    @property
    def openai_server(self) -> OpenAIServer: ...

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, chat_request: ChatRequest) -> list[int]: ...

    def encode_chat_with_images(self, chat_request: ChatRequest) -> EncodedPrompt: ...

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

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
