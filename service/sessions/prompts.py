"""Prompt of an agent's call: the tokens of the previous call plus the newly added text.

A conversation is rendered whole if it continues no recorded call, if the session's history is that
of the template, or if the template does not mark where a message ends.
"""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from engine.types.chat import ChatRequest
from service.fair_threads import FairThreads
from service.rollouts.tokenizer import Tokenizer, num_template_chars
from service.rollouts.trees.token_tree import TokenTree
from service.sessions.history import Conversations, Match, RecordedCall

History = Literal["sampled", "template"]
Fallback = Literal["template", "no_turn_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Token ids of a conversation, not checked for length, and the recorded call it continues.

    `fallback`: the conversation was rendered whole although it continues a recorded call.
    """

    token_ids: list[int]
    match: Match | None = None
    fallback: Fallback | None = None


async def chat_prompt(
    tokenizer: Tokenizer,
    threads: FairThreads,
    tree: TokenTree,
    conversations: Conversations,
    chat_request: ChatRequest,
    history: History = "sampled",
) -> ChatPrompt:
    """Prompt of an agent's conversation.

    With the history `sampled`, the policy reads the tokens of its last turn and of all turns before
    it as it sampled them, with its reasoning. The chat template applies to later messages only.
    """
    # In threads: a request may hold millions of values.
    num_chars = await asyncio.to_thread(num_template_chars, chat_request)
    match = await threads.run(
        "conversations", num_chars, partial(conversations.match, chat_request)
    )
    if match is None:
        return ChatPrompt(token_ids=await tokenizer.rendered(chat_request))
    fallback: Fallback = "template"
    if history == "sampled" and chat_request.truncate_prompt_tokens is None:
        token_ids = await _continued(tokenizer, tree, chat_request, match)
        if token_ids is not None:
            return ChatPrompt(token_ids=token_ids, match=match)
        fallback = "no_turn_end"
    whole = await tokenizer.rendered(with_reasoning(chat_request, match))
    return ChatPrompt(token_ids=whole, match=match, fallback=fallback)


async def _continued(
    tokenizer: Tokenizer, tree: TokenTree, chat_request: ChatRequest, match: Match
) -> list[int] | None:
    """Tokens of the matched call and what follows; None if its end cannot be found."""
    segment = match.call.segment
    if chat_request.continue_final_message and match.index == len(chat_request.messages) - 1:
        return await continued_text(tokenizer, tree, match.call, "")
    last_token = int(segment.token_ids[-1])
    after = await tokenizer.rendered_after(chat_request, match.index, last_token)
    return None if after is None else [*tree.token_ids(segment), *after]


async def continued_text(
    tokenizer: Tokenizer, tree: TokenTree, call: RecordedCall, text: str
) -> list[int]:
    """Tokens of a recorded call as far as the agent has received their text, and then a text."""
    tokens = tree.token_ids(call.segment)
    after = call.rest + text
    added = await tokenizer.encoded(after, add_special_tokens=False) if after else []
    return [*tokens[: len(tokens) - call.num_hidden], *added]


def with_reasoning(chat_request: ChatRequest, match: Match) -> ChatRequest:
    """The conversation with the reasoning of recorded calls, which agents drop."""
    messages = [dict(message) for message in chat_request.messages]
    for index, call in match.earlier.items():
        if call.reasoning is not None:
            messages[index].setdefault("reasoning", call.reasoning)
    return replace(chat_request, messages=messages)
