"""Execution of a request of another server's API as a native rollout.

A route module defines only its wire format. `CompatRequest` does the rest: it reads the body,
converts prompts to token ids, starts the rollout and waits for its samples. The prompt token ids in
an answer are therefore exactly those that the engine received, and no token is ever decoded and
encoded again.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from fastapi import Depends, Request, Response
from pydantic import ValidationError

from coppice.wire.rollouts import (
    MAX_GROUPS,
    GroupAnswer,
    Prompt,
    RolloutAnswer,
    SampleAnswer,
    WeightsConstraint,
)
from coppice.wire.sessions import AgentApi
from engine.types.chat import ChatRequest, ChatResponse
from engine.types.samples import Sampling
from service.auth.access import Caller, declared_access
from service.auth.keys import ApiKey
from service.compat.bodies import (
    Body,
    Flag,
    Name,
    Priority,
    SamplingBody,
    read_compat_body,
)
from service.compat.sampling_fields import SamplingFields
from service.errors import InvalidRequest, NotFound
from service.http.bodies import fault
from service.http.exception_handlers import cancel_on_disconnect
from service.http.responses import (
    ADMIN_ERRORS,
    BODY_ERRORS,
    ENGINE_ERRORS,
    large_response,
    to_json_bytes,
)
from service.rollouts.request import NewGroup, NewRollout
from service.rollouts.rollout import Rollout
from service.routes.dependencies import ReadyServer
from service.sessions.agent_call import SessionCall

ROLLOUT_ERRORS = (*ADMIN_ERRORS, *BODY_ERRORS, *ENGINE_ERRORS)

_SEED_MASK = 2**62 - 1  # trainers send seeds of 63 bits


ParseSample = Callable[[SampleAnswer], Awaitable[ChatResponse]]
"""Parses a sample that has ended to the message of its response."""

AGENT_APIS: dict[str, AgentApi] = {
    "chat/completions": "chat",
    "completions": "completions",
    "messages": "messages",
    "responses": "responses",
}


def _session_call(request: Request, server: ReadyServer, caller: Caller) -> SessionCall | None:
    """The call of a session that a request is; None for the routes outside of sessions."""
    access = declared_access(request.scope["endpoint"])
    if access is None or not access.agent:
        return None
    name = request.scope["route"].path.partition("/v1/")[2]
    return server.sessions.call(request.path_params["session_id"], AGENT_APIS.get(name, "chat"))


class CommonRequestFields(SamplingBody):
    """Request fields that OpenAI's and vLLM's APIs share, except prompt and sampling parameters."""

    model: str | None = None
    return_token_ids: Flag = False
    priority: Priority = 0
    cache_salt: Name | None = None
    weights: WeightsConstraint | None = None
    return_support: Flag = False

    def rollout_request(
        self,
        prompts: Sequence[list[int]],
        fields: SamplingFields,
        max_tokens: int | None,
        adapter: str | None,
    ) -> NewRollout:
        return rollout_request(
            prompts,
            fields,
            max_tokens=max_tokens,
            adapter=adapter,
            priority=self.priority,
            weights=self.weights,
            return_support=self.return_support,
        )


class DecodedSample(NamedTuple):
    """A sample of a rollout with its detokenized text and the group that it belongs to."""

    group: GroupAnswer
    sample: SampleAnswer
    text: str


@dataclass(frozen=True, slots=True)
class CompatRequest:
    """A request in the format of vLLM, SGLang or OpenAI that runs as a rollout.

    A FastAPI dependency of the route's handler. With a `session_call` it is a call of an agent's
    session, which determines the adapter, the sampling parameters and the cache salt.
    """

    request: Request
    server: ReadyServer
    caller: Caller
    session_call: Annotated[SessionCall | None, Depends(_session_call)]

    @property
    def owner(self) -> str:
        """Name of the API key that the request counts for; in a session, that of its owner."""
        return self.caller.name if self.session_call is None else self.session_call.session.owner

    async def read(self, model: type[Body], *, limit: int | None = None) -> Body:
        return await read_compat_body(self.request, model, self.server, limit=limit)

    def resolve_adapter(self, model: str | None) -> str | None:
        """LoRA adapter that a request's model name denotes; None for the served model itself."""
        if self.session_call is not None:
            return None  # agents send any name
        info = self.server.engine.info
        if model in (None, info.model, info.model_given):
            return None
        if not info.max_adapters:
            message = f"this server serves only {info.model!r}: send this name, or no model"
            errors = [{"location": "model", "message": message}]
            raise NotFound(f"model: {message}", errors=errors)
        self.server.adapters.resolve(model)
        return model

    async def render(self, chat_request: ChatRequest) -> list[int]:
        """Prompt of a chat request: the token ids of its rendered messages."""
        if self.session_call is None:
            rendering = self.server.tokenizer.chat_request(chat_request)
        else:
            rendering = self.session_call.render(chat_request)
        return await cancel_on_disconnect(self.request, rendering)

    async def tokenize(self, build_prompts: Callable[[], list[Prompt]]) -> list[list[int]]:
        """Validate the prompts of a request against the limits of a rollout, and tokenize them.

        The client's request format does not enforce these limits.
        """
        return await cancel_on_disconnect(self.request, self._tokenize(build_prompts))

    async def _tokenize(self, build_prompts: Callable[[], list[Prompt]]) -> list[list[int]]:
        try:
            prompts = build_prompts()
        except ValidationError as error:
            raise fault(error) from error
        if not 0 < len(prompts) <= MAX_GROUPS:
            raise InvalidRequest(
                f"the request has {len(prompts)} prompts; send between 1 and {MAX_GROUPS}"
            )
        if self.session_call is not None:
            return await self.session_call.tokenize(prompts)
        return await self.server.tokenizer.all_token_ids(prompts)

    def refuse_in_session(self, **fields: object) -> None:
        """Refuse the given fields, if any is set, in a call of a session."""
        wrong = next((name for name, value in fields.items() if value not in (None, False)), None)
        if self.session_call is not None and wrong is not None:
            raise InvalidRequest.of_parameter(wrong, "not supported in a session")

    def set_parser(self, parse: ParseSample) -> None:
        """Set the parser of the samples' messages, which a session records."""
        if self.session_call is not None:
            self.session_call.set_parser(parse)

    async def parsed(self, sample: SampleAnswer, parse: ParseSample) -> ChatResponse:
        """Message of a sample; a session parses it once, so that tool calls keep their ids."""
        if self.session_call is None:
            return await parse(sample)
        return await self.session_call.parsed(sample)

    async def start(
        self,
        request: NewRollout,
        *,
        cache_salt: str | None,
        num_top_logprobs: int | None,
        stream_tokens: bool = False,
    ) -> Rollout:
        if self.session_call is not None:
            return await self.session_call.start(
                request, num_top_logprobs=num_top_logprobs, stream_tokens=stream_tokens
            )
        owned = replace(
            request,
            owner=self.caller.name,
            cache_salt=namespaced_salt(self.caller, cache_salt),
            num_top_logprobs=num_top_logprobs or 0,
            stream_tokens=stream_tokens,
        )
        return await self.server.rollouts.start(owned)

    async def wait(self, rollout: Rollout) -> RolloutAnswer:
        """Wait for a rollout and return its answer; cancel it if the client disconnects."""
        try:
            await cancel_on_disconnect(self.request, rollout.wait())
        finally:
            self.server.rollouts.on_disconnect(rollout)
        return await rollout.answer()

    async def json_response(self, build: Callable[[], object]) -> Response:
        """JSON response whose content is built and encoded in a thread."""
        return await large_response(self.server.threads, lambda: to_json_bytes(build()))

    async def decode(self, rollout: Rollout, answer: RolloutAnswer) -> list[DecodedSample]:
        """Detokenize all samples of a rollout, in the order of the prompts."""
        sampling = rollout.groups[0].options.sampling
        return [
            DecodedSample(group, sample, await self._text(sample, sampling))
            for group in answer.groups
            for sample in group.samples
        ]

    async def _text(self, sample: SampleAnswer, sampling: Sampling) -> str:
        tokenizer = self.server.tokenizer
        return await tokenizer.response_text(sample.token_ids, sample.stop_reason, sampling)


Compat = Annotated[CompatRequest, Depends()]


def rollout_request(
    prompts: Sequence[list[int]],
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    adapter: str | None,
    priority: int,
    weights: WeightsConstraint | None,
    seed: int | None = None,
    return_support: bool = False,
) -> NewRollout:
    """Request for n samples of each prompt, which is tokenized.

    `seed` has precedence over `fields.seed`.
    """
    seed = fields.seed if seed is None else seed
    truncated_seed = None if seed is None else seed & _SEED_MASK
    return NewRollout(
        groups=[NewGroup(prompt=prompt, n=fields.n, seed=truncated_seed) for prompt in prompts],
        sampling=fields.sampling(max_tokens),
        weights=weights,
        priority=priority,
        adapter=adapter,
        return_support=return_support,
    )


def namespaced_salt(caller: ApiKey, given: str | None) -> str | None:
    """Prefix-cache salt of a request, prefixed with the name of its API key.

    No key can probe the cache of another one by guessing its salt.
    """
    return None if given is None else f"{caller.name}:{given}"
