"""Samples of a rollout as vLLM's serving classes read them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

from coppice.wire.rollouts import SampleAnswer
from engine.protocol.openai_server import SampleDelta, SampleEnd
from engine.types.samples import TokenDelta, TopLogprobRows
from service.rollouts.rollout import Rollout
from service.server import Server
from service.sessions.agent_call import SessionCall

MAX_DELTA_TOKENS = 128
"""Tokens up to which deltas are joined; vLLM converts them on the event loop."""


class RolloutSamples:
    """The `engine.protocol.openai_server.RunningSamples` of a rollout, and its observer.

    Deltas that are not read in time are joined, so that a slow reader takes little memory.
    """

    def __init__(
        self, server: Server, session_call: SessionCall | None, num_top_logprobs: int | None
    ) -> None:
        self.prompt_logprobs: TopLogprobRows | None = None
        self._server = server
        self._session_call = session_call
        self._num_top_logprobs = num_top_logprobs
        self._rollout: Rollout | None = None
        self._deltas: dict[int, deque[TokenDelta]] = {}
        self._samples: list[SampleAnswer] = []
        self._read: dict[int, tuple[int, int]] = {}
        self._changed = asyncio.Event()
        self._ended = False

    def begin(self, rollout: Rollout) -> Self:
        self._rollout = rollout
        return self

    def on_delta(self, index: int, delta: TokenDelta) -> None:
        unread = self._deltas.setdefault(index, deque())
        if unread and len(unread[-1].token_ids) < MAX_DELTA_TOKENS:
            unread[-1] = _joined(unread[-1], delta)
        else:
            unread.append(delta)
        self._changed.set()

    def on_sample(self, sample: SampleAnswer) -> None:
        self._samples.append(sample)
        self._changed.set()

    def on_end(self) -> None:
        self._ended = True
        self._changed.set()

    async def deltas(self) -> AsyncIterator[SampleDelta]:
        rollout = self._rollout
        assert rollout is not None, "the samples are started"
        while True:
            await self._changed.wait()
            self._changed.clear()
            ended = self._ended
            while self._samples or self._deltas:
                index = self._samples[0].index if self._samples else next(iter(self._deltas))
                if index in self._deltas:
                    yield self._running(index)
                else:
                    yield self._last(rollout, self._samples.pop(0))
            if ended:
                break
        if rollout.error is not None:
            raise rollout.error
        rollout.check_here()

    def _running(self, index: int) -> SampleDelta:
        unread = self._deltas[index]
        delta = unread.popleft()
        if not unread:
            del self._deltas[index]
        text = delta.text or ""
        start, num_chars = self._read.get(index, (0, 0))
        self._read[index] = start + len(delta.token_ids), num_chars + len(text)
        return SampleDelta(
            index=index,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            text=text,
            top_logprobs=self._columns(delta.top_logprobs),
            num_cached_tokens=delta.num_cached_tokens,
        )

    def _last(self, rollout: Rollout, sample: SampleAnswer) -> SampleDelta:
        start, num_chars = self._read.pop(sample.index, (0, 0))
        group = rollout.groups[0]
        text, rows = group.texts[sample.index], group.top_logprobs.get(sample.index)
        return SampleDelta(
            index=sample.index,
            token_ids=sample.token_ids[start:],
            logprobs=sample.logprobs[start:],
            text=None if text is None else text[num_chars:],
            top_logprobs=None if rows is None else self._columns(rows[start:]),
            num_cached_tokens=group.cached_tokens.get(sample.index, 0),
            end=SampleEnd(
                finish_reason=finish_reason(sample),
                stop_reason=sample.stop_reason,
                versions=weight_version_spans(sample),
                support=sample.support and sample.support.model_dump(mode="json"),
            ),
        )

    def _columns(self, rows: TopLogprobRows | None) -> TopLogprobRows | None:
        """The top logprobs that the request wants; a session may have requested more."""
        k = self._num_top_logprobs
        return rows.columns(k) if rows is not None and k else None

    def cancel(self) -> None:
        if self._rollout is not None:
            self._server.rollouts.on_disconnect(self._rollout)
        if self._session_call is not None:
            self._session_call.on_received()


def _joined(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Both deltas as one, without versions, which are those of the sample's end."""
    rows = first.top_logprobs
    if rows is not None and second.top_logprobs is not None:
        rows = TopLogprobRows.joined([rows, second.top_logprobs])
    return TokenDelta(
        start=first.start,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        versions=(),
        top_logprobs=rows,
        text=(first.text or "") + (second.text or ""),
        num_cached_tokens=first.num_cached_tokens,
    )


def finish_reason(sample: SampleAnswer) -> str:
    """Finish reason as in vLLM, where every early end of a sample is `abort`."""
    reason = sample.finish_reason
    return reason if reason in ("stop", "length", "error") else "abort"


def weight_version_spans(sample: SampleAnswer) -> list[dict[str, Any]]:
    """Ranges of a sample's tokens as JSON, each with the weights version that generated it."""
    return [span.model_dump() for span in sample.versions]
