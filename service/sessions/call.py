"""One call of an agent: its prompt, its rollout, and the record of its samples."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coppice.wire.rollouts import GroupRequest, Prompt, RolloutRequest, SampleAnswer
from coppice.wire.sampling import Sampling
from coppice.wire.sessions import AgentApi, AttachReason, Turn
from coppice.wire.support import rows_of
from engine.types import ChatRequest, ChatResponse, TopLogprobRows
from service.http.errors import InvalidRequest
from service.observability.session_metrics import SessionMetrics
from service.rollouts.group_options import GroupOptions
from service.rollouts.logprob_tables import to_sample_table
from service.rollouts.manager import RolloutManager
from service.rollouts.rollout import Rollout
from service.rollouts.supports import Supports
from service.rollouts.tokenizer import Tokenizer
from service.sessions.history import ASSISTANT, Match, RecordedCall, TextMatch, attachment_reason
from service.sessions.prompts import Fallback, chat_prompt
from service.sessions.sampling import limited, merge_sampling
from service.sessions.session import RunningCall, Session
from service.sessions.tree import Attachment, Segment

log = logging.getLogger(__name__)

ParseSample = Callable[[SampleAnswer], Awaitable[ChatResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallServices:
    """Components that the calls of all sessions use.

    `on_call` is called at the beginning and at the end of each call, `on_growth` after a session's
    memory has changed. `check_memory` refuses a call if there is no memory for more tokens. `track`
    runs a coroutine in the background.
    """

    rollouts: RolloutManager
    tokenizer: Tokenizer
    metrics: SessionMetrics
    on_call: Callable[[Session], None]
    on_growth: Callable[[Session], None]
    check_memory: Callable[[], None]
    track: Callable[[Coroutine[Any, Any, None]], None]


class SessionCall:
    """One call of an agent within a session: `render` or `tokenize`, then `start`.

    A call of messages is recorded with the message that each sample was parsed to, a call of text
    with its text.
    """

    def __init__(self, session: Session, api: AgentApi, services: CallServices) -> None:
        self.session = session
        self._api = api
        self._services = services
        self._chat_request: ChatRequest | None = None
        self._text: str | None = None
        self._match: Match | TextMatch | None = None
        self._fallback: Fallback | None = None
        self._parse: ParseSample | None = None
        self._parsed: dict[int, asyncio.Future[ChatResponse]] = {}

    async def render(self, chat_request: ChatRequest) -> list[int]:
        """Token ids of a conversation, which begin with those of the call that it continues."""
        with self.session.preparing():
            return await self._render(chat_request)

    async def _render(self, chat_request: ChatRequest) -> list[int]:
        await self._begin()
        session, tokenizer = self.session, self._services.tokenizer
        prompt = await chat_prompt(
            tokenizer,
            session.tree,
            session.conversations,
            chat_request,
            session.options.history,
        )
        self._chat_request = chat_request
        self._match, self._fallback = prompt.match, prompt.fallback
        return tokenizer.check_token_ids(prompt.token_ids)

    async def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of a prompt; those of a recorded call, if the prompt's text continues one."""
        with self.session.preparing():
            return await self._tokenize(prompts)

    async def _tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        await self._begin()
        if len(prompts) != 1:
            raise InvalidRequest.of_parameter("prompt", "a call of a session has one prompt")
        [prompt] = prompts
        self._text = prompt.text
        match = None
        if prompt.text is not None and prompt.truncate_prompt_tokens is None:
            match_text = self.session.conversations.match_text
            match = await asyncio.to_thread(match_text, prompt.text)
        if match is None:
            return await self._services.tokenizer.all_token_ids(prompts)
        self._match = match
        return [await self._continued(match)]

    async def _continued(self, match: TextMatch) -> list[int]:
        tokens = self.session.tree.token_ids(match.call.segment)
        rest = await self._services.tokenizer.encoded(match.rest, add_special_tokens=False)
        return self._services.tokenizer.check_token_ids(
            [*tokens[: len(tokens) - match.call.num_hidden], *rest]
        )

    async def _begin(self) -> None:
        """Wait for the samples that the agent may refer to, which it has already received."""
        self._services.on_call(self.session)
        await self.session.wait_until_recorded()
        self.session.check_call(1)

    def set_parser(self, parse: ParseSample) -> None:
        self._parse = parse

    async def parsed(self, sample: SampleAnswer) -> ChatResponse:
        """Message of a sample that has ended, which is parsed once."""
        assert self._parse is not None, "the route has set a parser"
        if sample.index not in self._parsed:
            self._parsed[sample.index] = asyncio.ensure_future(self._parse(sample))
        return await asyncio.shield(self._parsed[sample.index])

    async def start(
        self, request: RolloutRequest, *, num_top_logprobs: int | None, stream_tokens: bool
    ) -> Rollout:
        """Start the rollout of a call whose prompt `render` or `tokenize` has returned.

        It runs with the session's sampling parameters, weights, adapter and priority. Its samples
        are recorded when it ends, however it ends.
        """
        session, [group] = self.session, request.groups
        session.check_call(group.n)
        self._services.check_memory()
        sampling = self._sampling(request)
        running = RunningCall(num_samples=group.n)
        session.calls.add(running)
        try:
            async with session.tree_lock:
                running.attachments += self._attach(group)
            request = self._request(group, limited(sampling, session.num_tokens_left()))
            running.rollout = await self._start(request, num_top_logprobs or 0, stream_tokens)
        finally:
            self._services.track(self._record(running))
        if not session.is_open:  # it was ended while the rollout was started
            await self._services.rollouts.cancel(running.rollout)
        return running.rollout

    async def _start(
        self, request: RolloutRequest, num_top_logprobs: int, stream_tokens: bool
    ) -> Rollout:
        session = self.session
        options = GroupOptions(
            cache_salt=session.cache_salt,
            num_top_logprobs=max(num_top_logprobs, session.options.top_logprobs or 0),
            num_returned_top_logprobs=num_top_logprobs,
            stream_tokens=stream_tokens,
        )
        rollouts = self._services.rollouts
        return await rollouts.start(request, owner=session.owner, options=options)

    def _sampling(self, request: RolloutRequest) -> Sampling:
        options = self.session.options
        sampling, num_replaced = merge_sampling(
            options.sampling, request.sampling, options.overrides
        )
        num_replaced += request.groups[0].seed is not None
        self._services.metrics.replaced_fields.inc(num_replaced)
        return sampling

    def _request(self, group: GroupRequest, sampling: Sampling) -> RolloutRequest:
        options = self.session.options
        return RolloutRequest.model_construct(
            groups=[group.model_copy(update={"seed": None, "seeds": None})],
            sampling=sampling,
            weights=options.weights,
            priority=options.priority,
            adapter=options.adapter,
            return_support=options.return_support,
        )

    def _attach(self, group: GroupRequest) -> list[Attachment]:
        assert group.prompt.token_ids is not None, "the prompt is tokenized"
        preferred = None if self._match is None else self._match.call.segment
        tree = self.session.tree
        return [tree.attach(group.prompt.token_ids, preferred) for _ in range(group.n)]

    async def _record(self, running: RunningCall) -> None:
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
                if segment is not None:
                    await self._try_to_remember(samples[index], segment)
        finally:
            self.session.calls.discard(running)
            running.recorded.set()
            self._services.on_call(self.session)
            self._services.on_growth(self.session)

    async def _add(
        self, rollout: Rollout | None, attachment: Attachment, sample: SampleAnswer | None
    ) -> Segment | None:
        """Add a sample to the tree; a call that has sampled nothing adds nothing."""
        session = self.session
        if rollout is None or sample is None:
            session.tree.detach(attachment)
            return None
        support = None
        if sample.support is not None:
            support = Supports(rows_of(sample.support), sample.support.vocab_size)
            session.num_table_bytes += len(sample.support.data)
        top_logprobs = None
        if k := session.options.top_logprobs:
            rows = rollout.groups[0].top_logprobs.get(sample.index)
            assert isinstance(rows, TopLogprobRows), "they were requested"
            top_logprobs = await to_sample_table(rows.columns(k), 0, len(sample.token_ids))
            session.num_table_bytes += top_logprobs.num_bytes
        segment = session.tree.add_sample(
            attachment,
            sample.token_ids,
            sample.logprobs,
            sample.versions,
            support=support,
            top_logprobs=top_logprobs,
            finish=sample.finish_reason,
            stop_reason=sample.stop_reason,
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
            num_prompt_tokens=attachment.num_prompt_tokens,
            num_cached_tokens=segment.num_cached_tokens,
            num_new_context_tokens=attachment.num_new_context_tokens,
            finish_reason=sample.finish_reason,
            api=self._api,
        )
        self.session.turns.append(turn)
        self.session.versions |= dict.fromkeys(span.version for span in sample.versions)
        self._services.metrics.record_turn(turn, len(sample.token_ids))

    def _reason(self, attachment: Attachment) -> AttachReason:
        if self._chat_request is not None:
            assert not isinstance(self._match, TextMatch), "a conversation matches messages"
            roles = {message.get("role") for message in self._chat_request.messages}
            fallback = self._fallback
            return attachment_reason(
                attachment, self._match, fallback, has_assistant=ASSISTANT in roles
            )
        if attachment.is_repeated:
            return "retry"
        if self._match is not None or attachment.attached == "extended":
            return "extended"
        return "new_conversation" if attachment.attached == "root" else "edited_history"

    async def _try_to_remember(self, sample: SampleAnswer, segment: Segment) -> None:
        """Record what the agent has received; after an error its next call is not matched."""
        try:
            await self._remember(sample, segment)
        except Exception as error:
            log.error("a response in a session cannot be matched later: %s", type(error).__name__)

    async def _remember(self, sample: SampleAnswer, segment: Segment) -> None:
        """Record what the agent has received, so that its next call is matched."""
        conversations = self.session.conversations
        if self._chat_request is not None and self._parse is not None:
            response = await self.parsed(sample)
            call = await self._recorded(sample, segment, reasoning=response.reasoning)
            await asyncio.to_thread(
                conversations.record, self._chat_request, _message(response), call
            )
        elif self._text is not None and not isinstance(sample.stop_reason, str):
            text = self._text + await self._services.tokenizer.text(sample.token_ids)
            call = await self._recorded(sample, segment)
            await asyncio.to_thread(conversations.record_text, text, call)

    async def _recorded(
        self, sample: SampleAnswer, segment: Segment, *, reasoning: str | None = None
    ) -> RecordedCall:
        """Record of a sample. A stop token that is special is not in the text of the sample."""
        num_hidden = 0
        if sample.finish_reason == "stop" and not isinstance(sample.stop_reason, str):
            text = self._services.tokenizer.text
            num_hidden = int(await text(sample.token_ids) == await text(sample.token_ids[:-1]))
        return RecordedCall(segment=segment, reasoning=reasoning, num_hidden=num_hidden)


async def _samples_of(rollout: Rollout | None) -> Mapping[int, SampleAnswer]:
    """Samples of a rollout by index, when it has ended; empty if it was not started or failed."""
    if rollout is None:
        return {}
    await rollout.wait()
    return {sample.index: sample for group in rollout.answers() for sample in group.samples}


def _message(response: ChatResponse) -> Mapping[str, Any]:
    """Message of the assistant as an agent sends it back."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in response.tool_calls
    ]
    message = {"role": ASSISTANT, "content": response.content, "reasoning": response.reasoning}
    return {**message, "tool_calls": calls} if calls else message
