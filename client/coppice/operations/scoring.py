"""Scoring: what the model thinks of responses that are given."""

from collections.abc import Iterable

from coppice.errors import BadAnswer
from coppice.scores import Scorable, Score, score_request, scores_of
from coppice.transport.messages import json_request
from coppice.transport.request_sender import RequestSender
from coppice.wire.rollouts import Policy
from coppice.wire.score import ScoreAnswer


class ScoreOperations:
    """Needs a courier and keeps no state beside it."""

    _sender: RequestSender

    async def score(
        self,
        prompts_and_responses: Iterable[Scorable],
        policy: Policy | None = None,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> tuple[Score, ...]:
        """Log-probabilities of given responses, at temperature 1 and without truncation.

        Each item is a prompt, in any form that `rollout` takes, and a list of responses as token
        ids. An adapter is named as in a rollout. It takes as long as the server needs, or `timeout`
        seconds of silence.
        """
        request = score_request(prompts_and_responses, policy, adapter)
        call = json_request("POST", "/v1/score", request, read_timeout=timeout, is_idempotent=True)
        answer = (await self._sender.send(call)).read(ScoreAnswer)
        try:
            return scores_of(answer, request)
        except ValueError as error:
            raise BadAnswer(str(error)) from error
