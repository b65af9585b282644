"""Tokenizer access on one thread at a time, shared fairly between API keys.

One thread at a time does it: tokenizers are not thread-safe, and text is rare here. Callers take
turns, and responses do not wait for prompts of the same caller.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from coppice.wire.rollouts import Prompt
from engine import errors
from engine.errors import ConversationRefused, NoTurnEnd, RequestRefused
from engine.protocol.text import Text
from engine.requests.stop_text import response_text, tokens_of_text
from engine.types.chat import ChatRequest, ChatResponse, EncodedPrompt, truncated
from engine.types.samples import Sampling
from service.errors import InvalidRequest, NoChatTemplate, PromptTooLong
from service.fair_threads import FairThreads
from service.rollouts.fairness import TimeSlice

Result = TypeVar("Result")

KEY_CHARS = 32 * 2**20
TOTAL_CHARS = 64 * 2**20
"""Limits of prompts that wait; a tokenizer takes about 1 s for 1 MiB."""
MAX_PIXELS = 2**27
"""Limit of the pixels of all images of a rollout."""


class ResponseTokens(NamedTuple):
    """Text of a response: that of its first `num_tokens` tokens, and then `rest`."""

    text: str
    num_tokens: int
    rest: str


class Tokenizer:
    """Runs the engine's tokenizer in threads, one piece of work at a time."""

    def __init__(self, engine: Text) -> None:
        self._engine = engine
        self._threads = FairThreads("prompts", key_bytes=KEY_CHARS, total_bytes=TOTAL_CHARS)

    async def prompts(self, prompts: Sequence[Prompt | list[int]]) -> list[EncodedPrompt]:
        """Encode the prompts of a rollout, whose messages may have images."""
        found, num_pixels, turn = list[EncodedPrompt](), 0, TimeSlice()
        for prompt in prompts:
            if isinstance(prompt, list) or not prompt.num_images:
                [token_ids] = await self.all_token_ids([prompt])
                encoded = EncodedPrompt(token_ids)
            else:
                encoded = await self._with_images(prompt)
                self.check_token_ids(encoded.token_ids)
            num_pixels += encoded.num_pixels
            if num_pixels > MAX_PIXELS:
                raise InvalidRequest(
                    f"the images of a request may have at most {MAX_PIXELS} pixels together: "
                    "send fewer groups"
                )
            found.append(encoded)
            await turn.pause()
        return found

    async def all_token_ids(self, prompts: Sequence[Prompt | list[int]]) -> list[list[int]]:
        tokens, turn = list[list[int]](), TimeSlice()
        for prompt in prompts:
            found = prompt if isinstance(prompt, list) else await self._kept_tokens(prompt)
            tokens.append(self.check_token_ids(found))
            await turn.pause()
        return tokens

    async def rendered(self, chat_request: ChatRequest) -> list[int]:
        """Token ids of a chat request after applying the chat template; not checked for length."""
        return await self._rendered(lambda: chat_request)

    async def _rendered(self, build: Callable[[], ChatRequest]) -> list[int]:
        return await self._chat_encoded(build, self._engine.encode_chat)

    async def _with_images(self, prompt: Prompt) -> EncodedPrompt:
        build = partial(to_chat_request, prompt)
        return await self._chat_encoded(build, self._engine.encode_chat_with_images)

    async def _chat_encoded(
        self, build: Callable[[], ChatRequest], encode: Callable[[ChatRequest], Result]
    ) -> Result:
        # In a thread: a request may hold millions of values.
        chat_request, num_chars = await asyncio.to_thread(_measured, build)
        try:
            return await self._encoded(num_chars, lambda: encode(chat_request))
        except NoTurnEnd:
            raise
        except ConversationRefused as error:
            raise InvalidRequest.of_parameter(error.field, str(error)) from error
        except errors.PromptTooLong as error:
            raise PromptTooLong(str(error)) from error
        except RequestRefused as error:
            raise NoChatTemplate() from error

    async def rendered_after(
        self, chat_request: ChatRequest, index: int, last_token: int
    ) -> list[int] | None:
        """Tokens after the assistant's message at `index`; see `Text.encode_chat_after`.

        None if the chat template does not mark where the message ends.
        """

        def encode(chat_request: ChatRequest) -> list[int]:
            return self._engine.encode_chat_after(chat_request, index, last_token=last_token)

        try:
            return await self._chat_encoded(lambda: chat_request, encode)
        except NoTurnEnd:
            return None

    async def encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, whose length the caller must have limited."""
        engine = self._engine
        return await self._encoded(
            len(text), lambda: engine.encode_text(text, add_special_tokens=add_special_tokens)
        )

    async def response_text(
        self, token_ids: Sequence[int], stop_reason: int | str | None, sampling: Sampling
    ) -> str:
        """Text of a response as requested, cut at the stop string that ended it."""
        text = self._response_text
        return await self._decoded(lambda: text(token_ids, stop_reason, sampling))

    async def tokens_of_response(
        self, token_ids: Sequence[int], stop_reason: int | str | None, sampling: Sampling
    ) -> ResponseTokens | None:
        """Tokens of a response's text; None if they are not the beginning of the sample's."""

        def find() -> ResponseTokens | None:
            text = self._response_text(token_ids, stop_reason, sampling)
            found = tokens_of_text(partial(self._decode, sampling), token_ids, text)
            return None if found is None else ResponseTokens(text, *found)

        return await self._decoded(find)

    def _response_text(
        self, token_ids: Sequence[int], stop_reason: int | str | None, sampling: Sampling
    ) -> str:
        return response_text(
            partial(self._decode, sampling),
            token_ids,
            stop_reason,
            include_stop_str=sampling.include_stop_str_in_output,
        )

    def _decode(self, sampling: Sampling, token_ids: Sequence[int]) -> str:
        return self._engine.decode(token_ids, skip_special_tokens=sampling.skip_special_tokens)

    async def message(
        self,
        build: Callable[[], ChatRequest],
        token_ids: Sequence[int],
        stop_reason: int | str | None,
        sampling: Sampling,
    ) -> ChatResponse:
        """Parsed response to the chat request of `build`, which runs in a thread."""
        return await self._decoded(
            lambda: self._engine.chat_response(
                token_ids, build(), stop_reason=stop_reason, sampling=sampling
            )
        )

    def check_token_ids(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a prompt; raises an error if they are invalid or too many."""
        info = self._engine.info
        if not tokens:
            raise InvalidRequest("a prompt has no tokens")
        if len(tokens) >= info.max_context_tokens:
            raise PromptTooLong(
                f"{len(tokens)} prompt tokens; the context holds {info.max_context_tokens}, "
                "of which at least one is needed for the response"
            )
        if max(tokens) >= info.vocab_size:
            raise InvalidRequest(f"token ids must be below {info.vocab_size}")
        return tokens

    async def _kept_tokens(self, prompt: Prompt) -> list[int]:
        found = await self._tokens(prompt)
        return truncated(found, prompt.truncate_prompt_tokens, prompt.truncation_side)

    async def _tokens(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.spans is not None:
            return [token for span in prompt.spans for token in span.token_ids]
        if prompt.text is not None:
            return await self._text_tokens(prompt.text)
        return await self._rendered(lambda: to_chat_request(prompt))

    async def _text_tokens(self, text: str) -> list[int]:
        """Tokenize a prompt text; a text that is certainly too long is rejected before that."""
        info = self._engine.info
        if info.max_token_chars is not None:
            max_chars = info.max_context_tokens * info.max_token_chars
            if len(text) > max_chars:
                raise PromptTooLong(
                    f"{len(text)} characters; the context holds {info.max_context_tokens} tokens, "
                    f"which are at most {max_chars} characters"
                )
        return await self._encoded(len(text), lambda: self._engine.encode_text(text))

    async def _encoded(self, num_chars: int, encode: Callable[[], Result]) -> Result:
        return await self._threads.run("prompts", num_chars, encode)

    async def _decoded(self, decode: Callable[[], Result]) -> Result:
        """Detokenize in a thread; does not count toward the limits of prompts."""
        return await self._threads.run("responses", 0, decode)


def to_chat_request(prompt: Prompt) -> ChatRequest:
    return ChatRequest(
        messages=[message.to_template_message() for message in prompt.messages or ()],
        tools=[tool.to_template_tool() for tool in prompt.tools],
        template_options=prompt.chat_template_kwargs,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        truncate_prompt_tokens=prompt.truncate_prompt_tokens,
        truncation_side=prompt.truncation_side,
    )


def _measured(build: Callable[[], ChatRequest]) -> tuple[ChatRequest, int]:
    chat_request = build()
    return chat_request, num_template_chars(chat_request)


def num_template_chars(chat_request: ChatRequest) -> int:
    """Total length of all strings that the chat template receives."""
    return _num_chars([chat_request.messages, chat_request.tools, chat_request.template_options])


def _num_chars(value: object) -> int:
    """Total length of all strings in nested mappings and lists, computed without recursion."""
    total, waiting = 0, [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            total += len(found)
        elif isinstance(found, Mapping):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, Sequence):
            waiting += found
    return total
