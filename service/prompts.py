"""Prompts to token ids and token ids to text, off the event loop.

One thread does all of it: tokenizers are not safe to share between threads, and text is rare here.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from coppice.wire.rollouts import Prompt
from engine import errors
from engine.errors import ConversationRefused, RequestRefused
from engine.protocol import Conversation, Engine, Reply
from service.errors import InvalidRequest, NoChatTemplate, PromptTooLong

Given = TypeVar("Given")
Result = TypeVar("Result")


class Prompts:
    """Owns the tokenizer's thread; `close` ends it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._token_texts: dict[int, str] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def token_ids(self, prompt: Prompt) -> list[int]:
        return self._checked(await self._tokens(prompt))

    async def conversation(self, conversation: Conversation) -> list[int]:
        return self._checked(await self.rendered(conversation))

    async def rendered(self, conversation: Conversation) -> list[int]:
        """As above, of any length."""
        try:
            return await self._off_loop(self._engine.encode_conversation, conversation)
        except ConversationRefused as error:
            raise InvalidRequest.of_parameter(error.field, str(error)) from error
        except errors.PromptTooLong as error:
            raise PromptTooLong(str(error)) from error
        except RequestRefused as error:
            raise NoChatTemplate() from error

    async def encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Of any length: callers bound the text."""
        encode = partial(self._engine.encode_text, add_special_tokens=add_special_tokens)
        return await self._off_loop(encode, text)

    async def text(self, token_ids: Sequence[int]) -> str:
        return await self._off_loop(self._engine.decode, token_ids)

    async def whole_text(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""
        decode = partial(self._engine.decode, skip_special_tokens=False)
        return await self._off_loop(decode, token_ids)

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return await self._off_loop(self._engine.token_pieces, token_ids)

    async def token_texts(self, collect: Callable[[], Iterable[int]]) -> Mapping[int, str]:
        """The text of each token; every token of the vocabulary is decoded once."""

        def decode(known: dict[int, str]) -> Mapping[int, str]:
            new = list(set(collect()) - known.keys())
            known.update(zip(new, self._engine.token_texts(new), strict=True))
            return known

        return await self._off_loop(decode, self._token_texts)

    async def reply(self, token_ids: Sequence[int], conversation: Conversation) -> Reply:
        def parse(given: Sequence[int]) -> Reply:
            return self._engine.reply(given, conversation)

        return await self._off_loop(parse, token_ids)

    def _checked(self, tokens: list[int]) -> list[int]:
        facts = self._engine.facts
        if not tokens:
            raise InvalidRequest("a prompt has no token")
        if len(tokens) >= facts.max_context_tokens:
            raise PromptTooLong(
                f"{len(tokens)} prompt tokens; the context holds {facts.max_context_tokens}, "
                "one of them at least for the response"
            )
        if max(tokens) >= facts.vocab_size:
            raise InvalidRequest(f"token ids must be below {facts.vocab_size}")
        return tokens

    async def _tokens(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.segments is not None:
            return [token for segment in prompt.segments for token in segment.token_ids]
        if prompt.text is not None:
            return await self._off_loop(self._engine.encode_text, prompt.text)
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages or ()]
        try:
            return await self._off_loop(self._engine.encode_messages, messages)
        except RequestRefused as error:
            raise NoChatTemplate() from error

    async def _off_loop(self, function: Callable[[Given], Result], given: Given) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, given)
