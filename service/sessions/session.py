"""State of one agent session: token tree, recorded calls, running calls and limits."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from coppice.wire.sessions import (
    SessionAnswer,
    SessionEndReason,
    SessionFinishRequest,
    SessionsRequest,
    SessionState,
    SessionStatus,
    SessionUsage,
    Turn,
)
from service.errors import (
    Draining,
    InvalidRequest,
    QuotaExceeded,
    SessionClosed,
    SessionExhausted,
)
from service.rollouts.rollout import Rollout
from service.rollouts.trees.segment import Attachment
from service.rollouts.trees.token_tree import TokenTree
from service.sessions.history import Conversations

RETRY_SECONDS = 1.0
SESSION_BYTES = 8192
TURN_BYTES = 2048
CONTEXT_TOKEN_BYTES = 8
SAMPLED_TOKEN_BYTES = 100


@dataclass(slots=True, kw_only=True, eq=False)
class RunningCall:
    """A call whose rollout starts or runs, or whose samples are not recorded yet.

    `num_samples` does not count those that are in the tree.
    """

    num_samples: int
    rollout: Rollout | None = None
    attachments: list[Attachment] = field(default_factory=list)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_sampled(self) -> bool:
        """True if all samples of the call have ended, so that they are recorded soon."""
        if self.rollout is None:
            return False
        progress = self.rollout.progress()
        return self.rollout.ended or progress.num_samples_done == progress.num_samples


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One episode of an agent. Owned by the session manager; runs on one event loop.

    `owner` is the name of the API key that created it. Each call moves `expires_at`. `max_tokens`
    limits the tokens of the trees, and `max_calls` the samples that run at the same time; as many
    prompts may be prepared at the same time, which `num_preparing` counts.
    `tree_lock` is held while the tree is changed, and while an answer is built in a thread.
    `num_table_bytes` is the size of supports and top logprobs, and `num_option_bytes` the session's
    part of the size of its options, which the sessions of a request share. `receiving` are calls
    whose messages the agent has not received yet, and `remembering` tasks that record those that it
    receives. Sessions with the same `cache_salt` share prefixes in the prefix cache. While the
    session `is_moving`, another replica receives it. A session that `is_returned` to the replica
    that has sent it is no longer here.
    """

    id: str
    owner: str
    group_id: str
    options: SessionsRequest
    cache_salt: str
    expires_at: float
    max_tokens: int
    max_calls: int
    num_option_bytes: int
    tree: TokenTree
    conversations: Conversations = field(default_factory=Conversations)
    state: SessionState = "open"
    end_reason: SessionEndReason | None = None
    sequence: int | None = None
    outcome: SessionFinishRequest = field(default_factory=SessionFinishRequest)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    turns: list[Turn] = field(default_factory=list)
    calls: set[RunningCall] = field(default_factory=set)
    receiving: WeakSet[Any] = field(default_factory=WeakSet)
    remembering: set[asyncio.Task[None]] = field(default_factory=set)
    versions: dict[str, None] = field(default_factory=dict)
    tree_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_table_bytes: int = 0
    num_preparing: int = 0
    is_moving: bool = False
    is_returned: bool = False
    _move_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    @property
    def can_move(self) -> bool:
        """True if no call runs or is received, and the session is open or has ended."""
        is_busy = self.calls or self.receiving or self.remembering or self.is_moving
        return not is_busy and (self.is_open or self.ended.is_set())

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Context manager around a move, during which the session does not change."""
        assert self.can_move, "the session changes"
        self.is_moving, self._move_ended = True, asyncio.Event()
        try:
            yield
        finally:
            self.is_moving = False
            self._move_ended.set()

    async def wait_for_move(self) -> None:
        while self.is_moving:
            await self._move_ended.wait()

    @property
    def is_exhausted(self) -> bool:
        """True if the session may make no further call, because of its turns or tokens."""
        max_turns = self.options.max_turns
        return len(self.turns) >= max_turns or self.tree.num_tokens >= self.max_tokens

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the session, in bytes."""
        return (
            SESSION_BYTES
            + self.num_option_bytes
            + TURN_BYTES * len(self.turns)
            + CONTEXT_TOKEN_BYTES * self.tree.num_context_tokens
            + SAMPLED_TOKEN_BYTES * self.tree.num_sampled_tokens
            + self.num_table_bytes
        )

    @property
    def num_samples_running(self) -> int:
        return sum(call.num_samples for call in self.calls)

    def check_open(self) -> None:
        if not self.is_open:
            raise SessionClosed(f"the session has ended ({self.end_reason})")

    def check_not_returned(self) -> None:
        """Refuse a request that is to be repeated, and is then redirected to the sender."""
        if self.is_returned:
            raise Draining(retry_after_seconds=RETRY_SECONDS)

    def check_call(self, num_samples: int) -> None:
        """Refuse a call of a session that has ended, or that exceeds its turns or running calls."""
        self.check_open()
        self.check_not_returned()
        if self.is_moving:
            raise Draining(retry_after_seconds=RETRY_SECONDS)
        if len(self.turns) + self.num_samples_running + num_samples > self.options.max_turns:
            raise SessionExhausted(f"the session may have {self.options.max_turns} turns")
        if self.num_samples_running + num_samples > self.max_calls:
            raise QuotaExceeded(
                f"the session may have {self.max_calls} running calls",
                retry_after_seconds=RETRY_SECONDS,
            )

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Context manager around the work on a prompt; refused if too many are prepared."""
        if self.num_preparing >= self.max_calls:
            raise QuotaExceeded(
                f"the session may have {self.max_calls} running calls",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1

    def num_tokens_left(self) -> int:
        """Number of tokens that may be sampled. Raises SessionExhausted if there are none."""
        left = self.max_tokens - self.tree.num_tokens
        if left <= 0:
            raise SessionExhausted(f"the session may have {self.max_tokens} tokens")
        return left

    async def wait_until_recorded(self) -> None:
        """Wait until the samples that have ended, and their messages, are recorded."""
        for call in list(self.calls):
            if call.has_sampled:
                await call.recorded.wait()
        await asyncio.gather(*self.remembering)

    async def wait_until_idle(self) -> None:
        for call in list(self.calls):
            await call.recorded.wait()
        await asyncio.gather(*self.remembering)

    async def check_leaves(self, outcome: SessionFinishRequest) -> None:
        """Refuse rewards of segments that are not leaves of the session's trees.

        The leaves are final if no call runs: nothing is awaited between this check and the end.
        """
        if not outcome.rewards:
            return
        await self.wait_until_recorded()
        answer = await self.answer()
        if self.calls:
            raise InvalidRequest.of_parameter(
                "rewards", "calls of the session are running: wait until they have ended"
            )
        leaves = {leaf for group in answer.groups for leaf in group.leaves or ()}
        if unknown := sorted(outcome.rewards.keys() - leaves):
            raise InvalidRequest.of_parameter("rewards", f"{unknown[0][:64]} is not a leaf")

    def usage(self) -> SessionUsage:
        num_prompt = sum(turn.num_prompt_tokens for turn in self.turns)
        num_cached = sum(turn.num_cached_tokens for turn in self.turns)
        return SessionUsage(
            num_turns=len(self.turns),
            num_prompt_tokens=num_prompt,
            num_cached_tokens=num_cached,
            num_forwarded_tokens=num_prompt - num_cached,
            num_context_tokens=self.tree.num_context_tokens,
            num_sampled_tokens=self.tree.num_sampled_tokens,
        )

    def status(self, now: float) -> SessionStatus:
        return SessionStatus(
            id=self.id,
            group=self.group_id,
            state=self.state,
            end_reason=self.end_reason,
            num_running_calls=len(self.calls),
            usage=self.usage(),
            attached=dict(Counter(turn.reason for turn in self.turns)),
            versions=list(self.versions),
            seconds_left=max(0.0, self.expires_at - now) if self.is_open else None,
            metadata=self.options.metadata,
        )

    async def answer(self) -> SessionAnswer:
        """The session's trees so far. They are built in a thread, because they may be large."""
        async with self.tree_lock:
            groups = await asyncio.to_thread(self.tree.answer, is_complete=not self.is_open)
            return SessionAnswer(
                id=self.id,
                group=self.group_id,
                state=self.state,
                end_reason=self.end_reason,
                sequence=self.sequence,
                metadata=self.options.metadata,
                reward=self.outcome.reward,
                rewards=self.outcome.rewards,
                groups=groups,
                turns=list(self.turns),
                usage=self.usage(),
            )
