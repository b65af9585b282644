"""Offers of a draining replica's rollouts and sessions to another replica."""

import asyncio
import logging
from contextlib import suppress

import httpx
from pydantic import ValidationError

from coppice.wire.problem_catalogue import Problem
from service.cluster.registry import Replica

CANCEL_SECONDS = 0.5
MAX_DETAIL = 200

log = logging.getLogger(__name__)


async def is_accepted(
    http: httpx.AsyncClient,
    replica: Replica,
    path: str,
    body: bytes,
    *,
    resource_id: str,
    seconds: float,
) -> bool:
    """True if the replica has accepted the resources; an offer without a response is cancelled.

    `resource_id` is the id by which the offer is cancelled.
    """
    url = replica.url.rstrip("/") + path
    try:
        async with asyncio.timeout(seconds):
            response = await http.post(url, content=body)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        log.warning("a move to %s failed: %s", replica.id, type(error).__name__)
        await cancel(http, f"{url}/{resource_id}")
        return False
    except asyncio.CancelledError:
        await cancel(http, f"{url}/{resource_id}")
        raise
    if response.status_code != 201:
        log.warning("replica %s refused %s: %s", replica.id, resource_id, refusal_of(response))
    return response.status_code == 201


def refusal_of(response: httpx.Response) -> str:
    """Status, code and detail of a problem document; only the status of another response."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return str(response.status_code)
    return (
        f"{response.status_code} {problem.code} ({(problem.detail or problem.title)[:MAX_DETAIL]})"
    )


async def cancel(http: httpx.AsyncClient, url: str) -> None:
    """Cancel a move whose outcome is unknown."""
    with suppress(httpx.HTTPError, httpx.InvalidURL, TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await http.delete(url)
