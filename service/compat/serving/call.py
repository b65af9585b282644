"""Execution of a request to vLLM's serving classes: its samples run as a rollout of one group."""

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from pydantic import ValidationError

from coppice.wire.rollouts import MAX_SAMPLES_PER_GROUP, Prompt, WeightsConstraint
from coppice.wire.sampling import Sampling as WireSampling
from coppice.wire.sessions import AgentApi
from engine.protocol.openai_server import SamplesRequest
from engine.types.chat import ChatRequest, ChatResponse, TruncationSide
from engine.types.samples import TopLogprobRows
from service.auth.access import Caller, declared_access
from service.auth.keys import ApiKey
from service.compat.response_store import ResponseName, Responses, StoredResponse
from service.compat.serving.samples import RolloutSamples
from service.errors import AdapterNotFound, InvalidRequest
from service.http.bodies import fault
from service.rollouts.groups.logprob_tables import check_count
from service.rollouts.request import NewGroup, NewRollout
from service.rollouts.scoring import ScoringOptions
from service.routes.dependencies import ReadyServer
from service.sessions.agent_call import SessionCall

MAX_PROMPT_LOGPROBS = 2**20
"""Maximum number of prompt logprobs in a response, over all choices; each takes about 50 bytes."""
SEED_MASK = 2**62 - 1
"""Bits of a seed that count: trainers send seeds of 63 bits."""
CONSTRAINTS = frozenset({"structured_outputs", "bad_words", "allowed_token_ids", "logit_bias"})
"""Parameters that may exclude all tokens; the sample then ends where a logprob is NaN."""
AGENT_APIS: dict[str, AgentApi] = {
    "chat/completions": "chat",
    "completions": "completions",
    "messages": "messages",
    "responses": "responses",
}


async def _session_call(
    request: Request, server: ReadyServer, caller: Caller
) -> SessionCall | None:
    """The call of a session that a request is; None for the routes outside of sessions."""
    access = declared_access(request.scope["endpoint"])
    if access is None or not access.agent:
        return None
    name = request.scope["route"].path.partition("/v1/")[2]
    return server.sessions.call(request.path_params["session_id"], AGENT_APIS.get(name, "chat"))


@dataclass(slots=True, kw_only=True)
class ServingCall:
    """The `engine.protocol.openai_server.ApiCall` of a request; a FastAPI dependency.

    With a `session_call` it is a call of an agent's session, which determines the adapter, the
    sampling parameters and the cache salt.
    """

    request: Request
    server: ReadyServer
    caller: Caller
    session_call: Annotated[SessionCall | None, Depends(_session_call)]
    responses: Responses
    weights: WeightsConstraint | None = field(default=None, init=False)

    @property
    def in_session(self) -> bool:
        return self.session_call is not None

    def serves(self, model: str) -> bool:
        info = self.server.engine.info
        return self.in_session or model in (info.model, info.model_given)  # agents send any name

    def has_adapter(self, model: str) -> bool:
        if not self.server.engine.info.max_adapters or self.serves(model):
            return False
        try:
            self.server.adapters.resolve(model)
        except AdapterNotFound:
            return False
        return True

    async def chat_prompt(self, chat_request: ChatRequest) -> list[int]:
        return await self._session.render(chat_request)

    async def text_prompt(
        self,
        prompt: str | list[int],
        *,
        truncate_prompt_tokens: int | None = None,
        truncation_side: TruncationSide = "left",
    ) -> list[int]:
        fields = {
            "text" if isinstance(prompt, str) else "token_ids": prompt,
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "truncation_side": truncation_side,
        }
        try:
            prompts = [Prompt.model_validate(fields)]
        except ValidationError as error:
            raise fault(error) from error
        [token_ids] = await self._session.tokenize(prompts)
        return token_ids

    @property
    def _session(self) -> SessionCall:
        assert self.session_call is not None, "vLLM renders other prompts"
        return self.session_call

    async def start(self, request: SamplesRequest) -> RolloutSamples:
        samples = RolloutSamples(self.server, self.session_call, request.num_top_logprobs)
        new = self._new_rollout(request, samples)
        samples.prompt_logprobs = await self._prompt_logprobs(request, new)
        if self.session_call is None:
            return samples.begin(await self.server.rollouts.start(new))
        rollout = await self.session_call.start(
            new, num_top_logprobs=request.num_top_logprobs, stream_tokens=request.is_streamed
        )
        return samples.begin(rollout)

    def _new_rollout(self, request: SamplesRequest, observer: RolloutSamples) -> NewRollout:
        if request.n > MAX_SAMPLES_PER_GROUP:
            raise InvalidRequest.of_parameter("n", f"must be at most {MAX_SAMPLES_PER_GROUP}")
        try:
            sampling = WireSampling.model_validate(dict(request.sampling))
        except ValidationError as error:
            raise fault(error) from error
        seed = None if request.seed is None else request.seed & SEED_MASK
        return NewRollout(
            owner=self.caller.name,
            groups=[
                NewGroup(
                    prompt=request.prompt_token_ids,
                    n=request.n,
                    seed=seed,
                    multimodal_input=request.multimodal_input,
                )
            ],
            sampling=sampling,
            weights=self.weights,
            priority=request.priority,
            adapter=request.adapter,
            return_support=request.return_support,
            stream_tokens=request.is_streamed,
            cache_salt=namespaced_salt(self.caller, request.cache_salt),
            num_top_logprobs=request.num_top_logprobs or 0,
            returns_text=request.returns_text,
            returns_logprobs=self.in_session
            or request.num_top_logprobs is not None
            or not CONSTRAINTS.isdisjoint(request.sampling),
            observer=observer,
        )

    async def _prompt_logprobs(
        self, request: SamplesRequest, new: NewRollout
    ) -> TopLogprobRows | None:
        """Logprobs of the prompt, computed once for all samples, by scoring it.

        Requests that compute prompt logprobs could not share the cached prefix. They are computed
        before the samples, so that a rejection, or a drain that begins meanwhile, costs no sample.
        """
        count, prompt = request.num_prompt_logprobs, request.prompt_token_ids
        check_count(
            self.server.engine.info, logprobs=request.num_top_logprobs, prompt_logprobs=count
        )
        if count is None:
            return None
        excluded = {"in a session": self.in_session, "with images": request.multimodal_input}
        if where := next((where for where, value in excluded.items() if value), None):
            raise InvalidRequest.of_parameter("prompt_logprobs", f"not supported {where}")
        # Every choice repeats them, so a small request could produce a response of gigabytes.
        num_values = len(prompt) * (count + 1) * request.n
        if num_values > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest.of_parameter(
                "prompt_logprobs",
                f"the response would hold {num_values} logprobs over all choices, and the limit is "
                f"{MAX_PROMPT_LOGPROBS}: send a shorter prompt, n: 1, or use POST /v1/score",
            )
        options = ScoringOptions(new.weights, new.adapter)
        [scores] = await self.server.scoring.prompts(
            [prompt], count, owner=self.caller.name, options=options
        )
        return scores

    def on_message(self, index: int, message: ChatResponse) -> None:
        self._session.on_message(index, message)

    def response_name(self, response_id: str) -> ResponseName:
        """Name of a stored response, which only its caller, or the agent of its session, finds."""
        owner = self.caller.name if self.session_call is None else self.session_call.session.owner
        return ResponseName(owner=owner, scope=self.caller.name, id=response_id)

    def stored_response(self, response_id: str) -> StoredResponse | None:
        return self.responses.get(self.response_name(response_id))

    def store_response(self, response_id: str, response: bytes, messages: bytes) -> None:
        stored = StoredResponse(response=response, messages=messages)
        self.responses.put(self.response_name(response_id), stored)


Serving = Annotated[ServingCall, Depends()]


def namespaced_salt(caller: ApiKey, given: str | None) -> str | None:
    """Prefix-cache salt of a request, prefixed with the name of its API key.

    No key can probe the cache of another one by guessing its salt.
    """
    return None if given is None else f"{caller.name}:{given}"
