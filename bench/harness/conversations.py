"""Scripted conversations of agents: tools, branches, compaction and sub-agents; no randomness.

A script is the same in every run and for every server. Only the policy's turns come from a server.
"""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Ask = Callable[[list[Message]], Awaitable[str]]
"""Sends a conversation to the policy; returns the text of its turn."""

SYSTEM, QUESTION, RESULT, SUMMARY = 400, 100, 120, 200


@dataclass(slots=True)
class Chat:
    """A conversation in progress. `key` makes its texts differ from those of other runs."""

    ask: Ask
    key: str
    messages: list[Message]
    numbers: "itertools.count[int]"

    @classmethod
    def started(cls, ask: Ask, key: str) -> "Chat":
        chat = cls(ask, key, [], itertools.count())
        chat.add("system", SYSTEM)
        chat.add("user", QUESTION)
        return chat

    def add(self, role: str, length: int) -> None:
        """Adds a text of about `length` tokens that occurs once."""
        mark = f"{role} {self.key} {next(self.numbers)}: "
        self.messages.append({"role": role, "content": (mark * length)[:length]})

    async def turn(self, *, result: bool = True) -> None:
        """A turn of the policy and, by default, the result of its tool."""
        content = await self.ask(list(self.messages))
        self.messages.append({"role": "assistant", "content": content})
        if result:
            self.add("user", RESULT)

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await self.turn()


async def linear(ask: Ask, key: str) -> None:
    await Chat.started(ask, key).turns(8)


async def branches(ask: Ask, key: str) -> None:
    """The agent goes back to its second turn twice, and continues from there."""
    chat = Chat.started(ask, key)
    await chat.turns(2)
    start = list(chat.messages)
    for _ in range(3):
        chat.messages = start[:-1]
        chat.add("user", RESULT)
        await chat.turns(3)


async def compaction(ask: Ask, key: str) -> None:
    """The agent replaces its history with a summary after six turns."""
    chat = Chat.started(ask, key)
    await chat.turns(6)
    chat.messages = chat.messages[:2]
    chat.add("user", SUMMARY)
    await chat.turns(4)


async def sub_agents(ask: Ask, key: str) -> None:
    """Three sub-agents with system prompts of their own; the main agent reads their results."""
    chat = Chat.started(ask, key)
    for number in range(3):
        await chat.turn()
        await Chat.started(ask, f"{key}-{number}").turns(3)
    await chat.turn(result=False)


SCRIPTS = {
    "linear": linear,
    "branches": branches,
    "compaction": compaction,
    "sub-agents": sub_agents,
}
