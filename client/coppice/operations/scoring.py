"""Scoring operation: logprobs of given responses."""

from collections.abc import Iterable

from coppice.errors import BadAnswer
from coppice.scores import Scorable, Score, score_request, scores_of
from coppice.transport.messages import json_request
from coppice.transport.request_sender import RequestSender
from coppice.wire.rollouts import Policy
from coppice.wire.score import ScoreAnswer


class ScoreOperations:
    """Scoring operation."""

    _sender: RequestSender

    async def score(
        self,
        prompts_and_responses: Iterable[Scorable],
        policy: Policy | None = None,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> tuple[Score, ...]:
        """Logprobs of given responses, at temperature 1 and without truncation.

        Each item is a prompt, in any form that `rollout` accepts, and a list of responses as token
        ids. `adapter` is a name as in a rollout. `timeout` is the longest silence in seconds; None
        means no limit.
        """
        request = score_request(prompts_and_responses, policy, adapter)
        call = json_request("POST", "/v1/score", request, read_timeout=timeout, is_idempotent=True)
        answer = (await self._sender.send(call)).read(ScoreAnswer)
        try:
            return scores_of(answer, request)
        except ValueError as error:
            raise BadAnswer(str(error)) from error
