"""Callers of a cluster.

They use any replica, return through another, disconnect or are cut off midway, and keep the
reports.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress

import httpx

from coppice import (
    AsyncRollouts,
    ClusterUnavailable,
    ConnectionFailed,
    EngineUnavailable,
    Kv,
    NotFound,
    Retry,
    RolloutLost,
    RolloutResult,
    StartRecord,
    StreamBroken,
    TimedOut,
    VersionSuperseded,
    VersionUnavailable,
    WeightsConstraint,
)
from coppice.rollout_options import RolloutOptions, rollout_request
from tests.soak.cluster_model import FleetModel, TokenReport
from tests.soak.replicas import LEASE_SECONDS

NUM_SAMPLES = 4
MAX_TOKENS = 24


# Problems that ask the caller to resend its groups; anything else is a failure of the cluster.
RESEND = (
    *(ConnectionFailed, StreamBroken, TimedOut, RolloutLost, NotFound),
    *(EngineUnavailable, ClusterUnavailable, VersionSuperseded, VersionUnavailable),
)
RETRY = Retry(attempts=4, base_seconds=0.1, max_seconds=1.0, total_seconds=15.0)


class FleetLoad:
    """`counts`: groups answered, retried by reason, and disconnected. `reports`: tokens received.

    `version`: the number of the requested version.
    """

    def __init__(self, urls: Sequence[str], model: FleetModel, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.reports: set[TokenReport] = set()
        self.version = 0
        self.over = False
        self._urls = urls
        self._vocabulary = model.vocabulary
        self._random = random.Random(seed)
        self._clients: list[AsyncRollouts] = []
        self._cutting: httpx.AsyncClient

    async def run(self, num_callers: int) -> None:
        async with AsyncExitStack() as stack:
            self._cutting = await stack.enter_async_context(httpx.AsyncClient(timeout=10))
            for url in self._urls:
                client = AsyncRollouts(url, retry=RETRY, timeout=10)
                self._clients.append(await stack.enter_async_context(client))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_callers):
                    tasks.create_task(self._call())

    async def _call(self) -> None:
        while not self.over:
            mode = self._random.choice(
                (self._streamed, self._submitted, self._disconnect, self._reset_connection)
            )
            prompt = self._random.choices(self._vocabulary, k=self._random.randint(2, 60))
            while not await self._answered(mode, prompt) and not self.over:
                await asyncio.sleep(0.1)

    async def _answered(
        self, mode: Callable[[list[int], int], Awaitable[None]], prompt: list[int]
    ) -> bool:
        try:
            await mode(prompt, self.version)
        except RESEND as error:
            self.counts[f"retried after {type(error).__name__}"] += 1
            return False
        return True

    async def _streamed(self, prompt: list[int], version: int) -> None:
        self._check(await self._any().rollout([prompt], **self._options(version)), prompt, version)

    async def _submitted(self, prompt: list[int], version: int) -> None:
        pending = await self._any().submit([prompt], **self._options(version))
        result = await self._any().attach(pending.id).wait(30)
        self._check(result, prompt, version)

    async def _disconnect(self, prompt: list[int], version: int) -> None:
        records = self._any().stream([prompt], **self._options(version))
        async with aclosing(records):
            async for record in records:
                if not isinstance(record, StartRecord):
                    break
        self.counts["caller disconnected"] += 1

    async def _reset_connection(self, prompt: list[int], version: int) -> None:
        """Disconnects without a key or an abort: only the closed connection ends the rollout."""
        body = rollout_request([prompt], **self._options(version)).model_dump_json()
        url = f"{self._random.choice(self._urls)}/v1/rollouts"
        headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
        with suppress(httpx.TransportError):
            async with self._cutting.stream("POST", url, content=body, headers=headers) as answer:
                async for _ in answer.aiter_raw():
                    self.counts["connection reset by the caller"] += answer.status_code == 200
                    break

    def _check(self, result: RolloutResult, prompt: list[int], version: int) -> None:
        (group,) = result.groups
        reasons = {sample.finish_reason for sample in group.samples}
        if reasons - {"length"} == {"version_changed"}:
            self.counts["answered in part, because the weights version changed"] += 1
        else:
            self.counts["answered"] += 1
            if [len(sample.token_ids) for sample in group.samples] != [MAX_TOKENS] * NUM_SAMPLES:
                ends = [(sample.finish_reason, len(sample.token_ids)) for sample in group.samples]
                self.violations.append(f"samples of another length in {result.id}: {ends}")
        for sample in group.samples:
            if {span.version for span in sample.versions} - {f"v{version}"}:
                self.violations.append(f"tokens of another version in {result.id}")
            if sample.token_ids.size:
                tokens = tuple(map(int, sample.token_ids))
                self.reports.add(TokenReport(version, tuple(prompt), tokens))

    def _options(self, version: int) -> RolloutOptions:
        return RolloutOptions(
            n=NUM_SAMPLES,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            weights=WeightsConstraint(exact_version=f"v{version}"),
            kv=Kv(lease_seconds=LEASE_SECONDS),
        )

    def _any(self) -> AsyncRollouts:
        return self._random.choice(self._clients)
