"""Protocol of an engine's generation methods: submit, score and abort samples."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.protocol.info_and_health import EngineState
from engine.types.samples import Completion, SampleRequest, Sampling, TopLogprobRows, VersionSpan


class Generation(EngineState, Protocol):
    """Generation of samples, and logprobs of given tokens.

    check_sampling: raises SamplingRefused if a sampling parameter cannot be applied, or if
        compiling its structured outputs takes too long. Call it once before `submit`. Checks of
        structured outputs take turns by `client`; raises QueueFull if too many wait.
    submit: adds all samples of the call to the engine in one iteration of the event loop, in order.
        Returns one awaitable per sample, each to be awaited once. Raises RequestRefused before any
        sample is added. An awaitable raises EngineDead as soon as the engine is known to be gone.
        `on_tokens` of a sample is called with its new tokens until it ends, with those of several
        engine steps together if many samples have one. The deltas are consecutive, and the tokens
        after the last one are in the completion only. Its exception is raised by the awaitable.
    abort: the samples' awaitables finish with finish="abort" and all tokens so far, after the
        engine step in progress. Unknown and finished ids are ignored.
    progress: per sample, the version spans of the tokens sampled until a fraction of a second ago.
        Empty for samples that wait, have finished or are unknown. Takes time proportional to the
        number of ids.
    score: logprobs of the response's tokens after the prompt, under the model's own distribution at
        temperature 1, with or without an adapter. Cancelling the call cancels the work.
    top_logprobs: the logprob of every prompt token, as in `score`, with the top k tokens. The entry
        of the first token is empty. With `given` [prompt tokens, m], the logprobs of these tokens
        instead of the top k; its first row is ignored.
    release_session_kv: call when sessions have ended, whose KV is then evicted like all other. Each
        sample with a `session_id` retains its KV when it ends, until the session's next sample.
        Unknown sessions are ignored.
    """

    async def check_sampling(self, sampling: Sampling, client: str = "") -> None: ...

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]: ...

    def progress(self, sample_ids: Sequence[str]) -> list[tuple[VersionSpan, ...]]: ...

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]: ...

    async def top_logprobs(
        self,
        prompt: Sequence[int],
        num_top_logprobs: int,
        adapter: str | None = None,
        given: NDArray[np.int32] | None = None,
    ) -> TopLogprobRows: ...

    async def abort(self, sample_ids: Sequence[str]) -> None: ...

    async def release_session_kv(self, session_ids: Sequence[str]) -> None: ...
