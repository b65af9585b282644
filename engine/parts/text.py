"""Mixin of the vLLM engine for text: tokenizer, chat template, response parsers."""

from collections.abc import Sequence

from engine.openai_server.server import VllmOpenAIServer
from engine.parts.state import VllmState
from engine.protocol.openai_server import OpenAIServer
from engine.protocol.text import DEFAULT_SAMPLING
from engine.requests.chat_conversion import ChatProcessor
from engine.types.chat import ChatRequest, ChatResponse, EncodedPrompt
from engine.types.samples import Sampling


class VllmText(VllmState):
    """The `engine.protocol.text.Text` of vLLM."""

    _chat: ChatProcessor
    _openai_server: VllmOpenAIServer

    @property
    def openai_server(self) -> OpenAIServer:
        return self._openai_server

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        return self._chat.encode(chat_request)

    def encode_chat_with_images(self, chat_request: ChatRequest) -> EncodedPrompt:
        return self._chat.encode_with_images(chat_request)

    def encode_chat_after(
        self, chat_request: ChatRequest, index: int, *, last_token: int
    ) -> list[int]:
        return self._chat.encode_after(chat_request, index, last_token=last_token)

    def chat_response(
        self,
        token_ids: Sequence[int],
        chat_request: ChatRequest,
        *,
        stop_reason: int | str | None = None,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> ChatResponse:
        return self._chat.chat_response(
            token_ids, chat_request, stop_reason=stop_reason, sampling=sampling
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        tokenizer = self.llm.get_tokenizer()
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
