"""One call of an agent in a session: renders its prompt and starts its rollout."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from coppice.wire.rollouts import Prompt
from coppice.wire.sampling import Sampling
from coppice.wire.sessions import AgentApi
from engine.types.chat import ChatRequest, ChatResponse
from service.errors import InvalidRequest
from service.rollouts.kept_kv import session_chain
from service.rollouts.request import NewGroup, NewRollout
from service.rollouts.rollout import Rollout
from service.rollouts.trees.segment import Attachment
from service.sessions.call_recorder import CallRecorder, CallServices
from service.sessions.history import TextMatch
from service.sessions.prompts import chat_prompt, continued_text
from service.sessions.sampling_params import limited, merge_sampling
from service.sessions.session import RunningCall, Session


class SessionCall:
    """One call of an agent within a session: `render` or `tokenize`, then `start`."""

    def __init__(self, session: Session, api: AgentApi, services: CallServices) -> None:
        self.session = session
        self._services = services
        self._recorder = CallRecorder(session=session, api=api, services=services)

    async def render(self, chat_request: ChatRequest) -> list[int]:
        """Token ids of a conversation, which begin with those of the call that it continues."""
        with self.session.preparing():
            return await self._render(chat_request)

    async def _render(self, chat_request: ChatRequest) -> list[int]:
        await self._begin()
        session, tokenizer = self.session, self._services.tokenizer
        prompt = await chat_prompt(
            tokenizer,
            self._services.threads,
            session.tree,
            session.conversations,
            chat_request,
            session.options.history,
        )
        recorder = self._recorder
        recorder.chat_request = chat_request
        recorder.match, recorder.fallback = prompt.match, prompt.fallback
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
        self._recorder.text = prompt.text
        match = None
        if prompt.text is not None and prompt.truncate_prompt_tokens is None:
            match = await self._services.threads.run(
                "conversations",
                len(prompt.text),
                partial(self.session.conversations.match_text, prompt.text),
            )
        if match is None:
            return await self._services.tokenizer.all_token_ids(prompts)
        self._recorder.match = match
        return [await self._continued(match)]

    async def _continued(self, match: TextMatch) -> list[int]:
        tokenizer, tree = self._services.tokenizer, self.session.tree
        token_ids = await continued_text(tokenizer, tree, match.call, match.rest)
        return tokenizer.check_token_ids(token_ids)

    async def _begin(self) -> None:
        """Wait for the samples that the agent may refer to, which it has already received."""
        self._services.on_call(self.session)
        await self.session.wait_until_recorded()
        self.session.check_call(1)

    def on_message(self, index: int, message: ChatResponse) -> None:
        """Record the message of a sample, which the agent is about to receive; in any thread."""
        self._recorder.on_message(index, message)

    async def start(
        self, request: NewRollout, *, num_top_logprobs: int | None, stream_tokens: bool
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
            sampling = limited(sampling, session.num_tokens_left())
            own = replace(
                self._request(group, sampling, num_top_logprobs or 0, stream_tokens),
                returns_text=request.returns_text,
                observer=request.observer,
            )
            running.rollout = await self._services.rollouts.start(own)
        finally:
            self._services.track(self._recorder.record(running))
        if not session.is_open:  # it was ended while the rollout was started
            await self._services.rollouts.cancel(running.rollout)
        self._recorder.on_started()
        return running.rollout

    def on_received(self) -> None:
        """Let the session move: the agent has received the messages, or receives no more."""
        self._recorder.on_received()

    def _sampling(self, request: NewRollout) -> Sampling:
        options = self.session.options
        sampling, num_replaced = merge_sampling(
            options.sampling, request.sampling, options.overrides
        )
        num_replaced += request.groups[0].seed is not None
        self._services.metrics.replaced_fields.inc(num_replaced)
        return sampling

    def _request(
        self, group: NewGroup, sampling: Sampling, num_top_logprobs: int, stream_tokens: bool
    ) -> NewRollout:
        session, options = self.session, self.session.options
        return NewRollout(
            owner=session.owner,
            groups=[NewGroup(prompt=group.prompt, n=group.n)],
            sampling=sampling,
            weights=options.weights,
            priority=options.priority,
            adapter=options.adapter,
            return_support=options.return_support,
            stream_tokens=stream_tokens,
            cache_salt=session.cache_salt,
            session_id=session.id,
            chain=session_chain(session.cache_salt, options.keep_kv),
            num_top_logprobs=max(num_top_logprobs, options.top_logprobs or 0),
        )

    def _attach(self, group: NewGroup) -> list[Attachment]:
        assert group.token_ids is not None, "the prompt is tokenized"
        match = self._recorder.match
        preferred = None if match is None else match.call.segment
        tree = self.session.tree
        return [tree.attach(group.token_ids, preferred) for _ in range(group.n)]
