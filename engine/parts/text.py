"""Mixin of the vLLM engine for text: tokenizer, chat template, response parsers."""

from collections.abc import Sequence

from engine.parts.state import VllmState
from engine.protocol.text import DEFAULT_SAMPLING, ResponseStream
from engine.requests import logprobs
from engine.requests.chat_conversion import ChatProcessor
from engine.types.chat import ChatRequest, ChatResponse
from engine.types.samples import Sampling


class VllmText(VllmState):
    """The `engine.protocol.text.Text` of vLLM."""

    _chat: ChatProcessor

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        return self._chat.encode(chat_request)

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

    def response_stream(
        self,
        sampling: Sampling = DEFAULT_SAMPLING,
        prompt: Sequence[int] = (),
        chat_request: ChatRequest | None = None,
    ) -> ResponseStream:
        return self._chat.response_stream(sampling, prompt, chat_request)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        tokenizer = self.llm.get_tokenizer()
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return logprobs.token_texts(self.llm.get_tokenizer(), token_ids)

    def token_pieces(self, token_ids: Sequence[int]) -> list[str]:
        return logprobs.token_pieces(self.llm.get_tokenizer(), token_ids)
