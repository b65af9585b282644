"""A minimal server: a callable that answers requests and records them."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import httpx
from pydantic import BaseModel

Answer = Callable[[httpx.Request], httpx.Response]


class App:
    """For httpx.MockTransport, which has read the request's body by the time of the call."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        return answer(request)

    @property
    def request(self) -> httpx.Request:
        """The only request; fails if there were several."""
        assert len(self.requests) == 1
        return self.requests[0]


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Chunks of an answer, and a flag for the client having closed it."""

    def __init__(self, chunks: Iterable[bytes], error: httpx.HTTPError | None = None) -> None:
        self.chunks = list(chunks)
        self.error = error
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self.chunks
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


def answering(model: BaseModel, status: int = 200) -> Answer:
    body = model.model_dump_json()
    return lambda request: httpx.Response(
        status, content=body, headers={"Content-Type": "application/json"}
    )


def streaming(body: Body) -> Answer:
    return lambda request: httpx.Response(
        200, stream=body, headers={"Content-Type": "application/x-ndjson"}
    )


def failing(error: httpx.RequestError) -> Answer:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error

    return answer


def refusing(
    code: str, status: int, headers: dict[str, str] | None = None, **members: object
) -> Answer:
    problem = {
        "type": f"/problems/{code}",
        "title": "No",
        "status": status,
        "code": code,
        **members,
    }
    return lambda request: httpx.Response(
        status,
        json=problem,
        headers={"Content-Type": "application/problem+json", **(headers or {})},
    )
