"""Recorder of an agent's call: adds its samples to the session's tree and history.

A response is recorded as the agent has received it, so that the prompt that continues it is found.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from coppice.wire.columns.token_columns import TABLES, column_bytes, columns_of
from coppice.wire.rollouts import SampleAnswer
from coppice.wire.sessions import AgentApi, AttachReason, Turn
from engine.types.chat import ChatRequest, ChatResponse
from engine.types.samples import Sampling
from service.fair_threads import FairThreads
from service.observability.session_metrics import SessionMetrics
from service.rollouts.groups.logprob_tables import to_table
from service.rollouts.manager import RolloutManager
from service.rollouts.rollout import Rollout
from service.rollouts.tokenizer import Tokenizer
from service.rollouts.trees.segment import Attachment, Segment
from service.sessions.history import ASSISTANT, Match, RecordedCall, TextMatch, attachment_reason
from service.sessions.prompts import Fallback
from service.sessions.session import RunningCall, Session

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallServices:
    """Components that the calls of all sessions use.

    `on_call` is called at the beginning and at the end of each call, `on_growth` after a session's
    memory has changed. `check_memory` refuses a call if there is no memory for more tokens. `track`
    runs a coroutine in the background. `threads` hash conversations.
    """

    rollouts: RolloutManager
    tokenizer: Tokenizer
    threads: FairThreads
    metrics: SessionMetrics
    on_call: Callable[[Session], None]
    on_growth: Callable[[Session], None]
    check_memory: Callable[[], None]
    track: Callable[[Coroutine[Any, Any, None]], None]


class _RecordedSample(NamedTuple):
    """A sample that is in the tree."""

    sample: SampleAnswer
    segment: Segment
    sampling: Sampling


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class CallRecorder:
    """Records the samples of one call, with the prompt that the agent has sent.

    A call of messages is recorded with the message that the agent receives of each sample, a call
    of text with its text. A message may come before or after its sample is in the tree.
    """

    session: Session
    api: AgentApi
    services: CallServices
    chat_request: ChatRequest | None = None
    text: str | None = None
    match: Match | TextMatch | None = None
    fallback: Fallback | None = None
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _messages: dict[int, ChatResponse] = field(default_factory=dict)
    _recorded: dict[int, _RecordedSample] = field(default_factory=dict)

    def on_started(self) -> None:
        """Let the session stay while the agent receives the messages of the call."""
        self._loop = asyncio.get_running_loop()
        self.session.receiving.add(self)

    def on_message(self, index: int, message: ChatResponse) -> None:
        """Record a message before the agent receives it, or when its sample is recorded.

        It may be called in any thread.
        """
        self._loop.call_soon_threadsafe(self._on_message, index, message)

    def on_received(self) -> None:
        """Let the session move, after the messages so far."""
        self._loop.call_soon(self.session.receiving.discard, self)

    def _on_message(self, index: int, message: ChatResponse) -> None:
        if index not in self._recorded:
            self._messages[index] = message
            return
        remembering = self.session.remembering
        task = asyncio.create_task(self._try_to_remember(self._recorded[index], message))
        remembering.add(task)
        task.add_done_callback(remembering.discard)

    async def record(self, running: RunningCall) -> None:
        """Add the samples of a call to the tree when its rollout has ended, and end the call."""
        try:
            samples = await _samples_of(running.rollout)
            async with self.session.tree_lock:
                segments = [
                    await self._add(running.rollout, attachment, samples.get(index))
                    for index, attachment in enumerate(running.attachments)
                ]
                running.num_samples = 0  # they are counted as turns
            for index, segment in enumerate(segments):
                if segment is not None and running.rollout is not None:
                    sampling = running.rollout.groups[0].options.sampling
                    recorded = _RecordedSample(samples[index], segment, sampling)
                    self._recorded[index] = recorded
                    await self._try_to_remember(recorded, self._messages.get(index))
        finally:
            self.session.calls.discard(running)
            running.recorded.set()
            self.services.on_call(self.session)
            self.services.on_growth(self.session)

    async def _add(
        self, rollout: Rollout | None, attachment: Attachment, sample: SampleAnswer | None
    ) -> Segment | None:
        """Add a sample to the tree; a call that has sampled nothing adds nothing."""
        session = self.session
        if rollout is None or sample is None:
            session.tree.detach(attachment)
            return None
        if k := session.options.top_logprobs:
            rows = rollout.groups[0].top_logprobs.get(sample.index)
            assert rows is not None, "they were requested"
            sample = sample.model_copy(update={"top_logprobs": await to_table(rows.columns(k))})
        session.num_table_bytes += column_bytes(sample, TABLES)
        segment = session.tree.add_sample(
            attachment,
            columns_of(sample),
            sample.finish_reason,
            sample.stop_reason,
            num_cached_tokens=rollout.groups[0].cached_tokens.get(sample.index, 0),
        )
        if segment is not None:
            self._add_turn(segment, attachment, sample)
        return segment

    def _add_turn(self, segment: Segment, attachment: Attachment, sample: SampleAnswer) -> None:
        turn = Turn(
            segment=segment.id,
            attached=attachment.attached,
            reason=self._reason(attachment),
            num_prompt_tokens=attachment.parent.end,
            num_cached_tokens=segment.num_cached_tokens,
            num_new_context_tokens=attachment.num_new_context_tokens,
            finish_reason=sample.finish_reason,
            api=self.api,
        )
        self.session.turns.append(turn)
        self.session.versions |= dict.fromkeys(span.version for span in sample.versions)
        self.services.metrics.record_turn(turn, len(sample.token_ids))

    def _reason(self, attachment: Attachment) -> AttachReason:
        if self.chat_request is not None:
            assert not isinstance(self.match, TextMatch), "a conversation matches messages"
            roles = {message.get("role") for message in self.chat_request.messages}
            return attachment_reason(
                attachment, self.match, self.fallback, has_assistant=ASSISTANT in roles
            )
        if attachment.is_repeated:
            return "retry"
        if self.match is not None or attachment.attached == "extended":
            return "extended"
        return "new_conversation" if attachment.attached == "root" else "edited_history"

    async def _try_to_remember(
        self, recorded: _RecordedSample, message: ChatResponse | None
    ) -> None:
        """Record what the agent receives; after an error its next call is not matched."""
        try:
            if self.chat_request is not None and message is not None:
                await self._remember_message(self.chat_request, message, recorded)
            elif self.text is not None:
                await self._remember_text(self.text, recorded)
        except Exception as error:
            log.error("a response in a session cannot be matched later: %s", type(error).__name__)

    async def _remember_message(
        self, chat_request: ChatRequest, message: ChatResponse, recorded: _RecordedSample
    ) -> None:
        received = await self._received(*recorded)
        call = RecordedCall(segment=recorded.segment, reasoning=message.reasoning)
        if received is not None:
            call = replace(received[1], reasoning=message.reasoning)
        self._mark_hidden(call)
        conversations = self.session.conversations
        await self._hashed(partial(conversations.record, chat_request, _message(message), call))

    async def _remember_text(self, prompt: str, recorded: _RecordedSample) -> None:
        """Record the text of a prompt and its response, also with what has ended it after it.

        An agent may send the stop string, or the text of the stop token, itself.
        """
        sample, segment, sampling = recorded
        received = await self._received(sample, segment, sampling)
        if received is None:
            return
        text, call = received
        self._mark_hidden(call)
        record = self.session.conversations.record_text
        await self._hashed(partial(record, prompt + text, call))
        if sample.finish_reason == "stop":
            include = not sampling.include_stop_str_in_output
            other = replace(sampling, include_stop_str_in_output=include)
            if (received := await self._received(sample, segment, other)) is not None:
                await self._hashed(partial(record, prompt + received[0], received[1]))

    async def _hashed(self, record: Callable[[], None]) -> None:
        """Run the recording of a conversation in a thread; it is never refused."""
        await self.services.threads.run("conversations", 0, record)

    async def _received(
        self, sample: SampleAnswer, segment: Segment, sampling: Sampling
    ) -> tuple[str, RecordedCall] | None:
        """Text of a response, and its record, as vLLM returns it.

        The text has what has ended the sample only if the request includes it, and a special token
        has no text. None if the text does not begin with that of the sample's tokens.
        """
        tokens_of = self.services.tokenizer.tokens_of_response
        found = await tokens_of(sample.token_ids, sample.stop_reason, sampling)
        if sample.finish_reason == "stop" and not isinstance(sample.stop_reason, str):
            before = await tokens_of(sample.token_ids[:-1], None, sampling)
            includes = sampling.include_stop_str_in_output
            if not includes or (before and found and before.text == found.text):
                found = before
        if found is None:
            return None
        num_hidden = len(sample.token_ids) - found.num_tokens
        return found.text, RecordedCall(segment=segment, num_hidden=num_hidden, rest=found.rest)

    def _mark_hidden(self, call: RecordedCall) -> None:
        """Set the number of hidden tokens in the turn of a recorded call."""
        turns = self.session.turns
        places = reversed(range(len(turns)))
        at = next(place for place in places if turns[place].segment == call.segment.id)
        turns[at] = turns[at].model_copy(update={"num_hidden_tokens": call.num_hidden})


async def _samples_of(rollout: Rollout | None) -> Mapping[int, SampleAnswer]:
    """Samples of a rollout by index, when it has ended; empty if it was not started or failed."""
    if rollout is None:
        return {}
    await rollout.wait()
    return {sample.index: sample for group in rollout.answers() for sample in group.samples}


def _message(response: ChatResponse) -> Mapping[str, Any]:
    """Message of the assistant as an agent sends it back."""
    calls: Sequence[Mapping[str, Any]] = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in response.tool_calls
    ]
    message = {"role": ASSISTANT, "content": response.content, "reasoning": response.reasoning}
    return {**message, "tool_calls": calls} if calls else message
