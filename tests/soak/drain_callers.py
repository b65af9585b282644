"""Callers of rollouts, readers of prompt KV and agents, who must not notice a drain."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, suppress

import httpx

from coppice import AsyncRollouts, Branching, CoppiceError, Kv, Retry
from coppice.operations.sessions import SessionOptions
from coppice.rollout_options import RolloutOptions, rollout_request
from coppice.session_results import AgentSession
from coppice.wire.packed.results import SampleRecord, SegmentRecord, TokensRecord
from tests.soak.cluster_model import FleetModel, TokenReport

NUM_SAMPLES = 4
MAX_TOKENS = 180
MAX_HELD_SECONDS = 8.0
MAX_ATTEMPTS = 4
NUM_TURNS = 3
MAX_TURN_SECONDS = 30.0
SESSION_OPTIONS = SessionOptions(sampling={"max_tokens": 12, "temperature": 0.0}, ttl_seconds=30)
"""A session whose agent has lost it after a fault expires soon."""
GRACE_SECONDS = 5.0
"""Time after a fault in which a caller may notice it: the expiry of a killed replica."""
RETRY = Retry(attempts=10, base_seconds=0.1, max_seconds=2.0, total_seconds=60.0)
GREEDY = RolloutOptions(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
OPTIONS = RolloutOptions(**GREEDY, n=NUM_SAMPLES)
BRANCHING = Branching(
    mode="interval", interval=48, max_depth=2, max_leaves=NUM_SAMPLES, flatten=True
)
NUM_SEGMENTS = 6
"""Two paths at the prompt, and two after the cut of each."""

Message = dict[str, str]


class LoadBalancer(httpx.AsyncBaseTransport):
    """Transport that sends requests to `URL` to a replica that accepts them, as nginx does.

    Other requests, which follow a redirect, are sent where they are addressed.
    """

    URL = "http://127.0.0.1:1"

    def __init__(self, urls: Sequence[str], numbers: random.Random) -> None:
        self._ports = [httpx.URL(url).port for url in urls]
        self._random = numbers
        self._transport = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.port != httpx.URL(self.URL).port:
            return await self._transport.handle_async_request(request)
        *first, last = self._random.sample(self._ports, len(self._ports))
        for port in first:
            request.url = request.url.copy_with(port=port)
            with suppress(httpx.ConnectError):
                response = await self._transport.handle_async_request(request)
                if response.status_code != 503:
                    return response
                await response.aclose()
        request.url = request.url.copy_with(port=last)
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()


class Callers:
    """Callers of long rollouts until `over`; all their samples are in `reports`.

    `counts` has their outcomes, with the names in `kinds`. `violations` are tokens that were lost
    or repeated, and rollouts, prompt KV and sessions that were lost. After a fault a rollout may be
    lost with the replica that ran it.
    """

    def __init__(self, urls: Sequence[str], model: FleetModel, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.reports: set[TokenReport] = set()
        self.over = False
        self.last_fault_at = -GRACE_SECONDS
        self._urls = urls
        self._model = model
        self._random = random.Random(seed)
        self._client: AsyncRollouts
        self._plain: httpx.AsyncClient
        modes = (
            self._streamed,
            self._submitted,
            self._plain_request,
            self._held_handle,
            self._tree,
            self._session,
        )
        self._modes = {mode.__name__.strip("_"): mode for mode in modes}

    @property
    def kinds(self) -> Collection[str]:
        return self._modes.keys()

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            balancers = [LoadBalancer(self._urls, self._random) for _ in range(2)]
            plain = httpx.AsyncClient(timeout=60, follow_redirects=True, transport=balancers[0])
            self._plain = await stack.enter_async_context(plain)
            client = AsyncRollouts(
                LoadBalancer.URL, retry=RETRY, timeout=60, transport=balancers[1]
            )
            self._client = await stack.enter_async_context(client)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._model.num_callers):
                    tasks.create_task(self._call())

    async def _call(self) -> None:
        while not self.over:
            name = self._random.choice(list(self._modes))
            prompt = self._random.choices(self._model.vocabulary, k=self._random.randint(2, 60))
            mode, began = self._modes[name], time.monotonic()
            try:
                self.counts[f"{await mode(prompt)} ({name})"] += 1
            except (CoppiceError, httpx.HTTPError) as error:
                self.counts[f"lost after a fault, {type(error).__name__} ({name})"] += 1
                if self.last_fault_at < began - GRACE_SECONDS:
                    self.violations.append(f"{name}: {error!r} without a fault")
                await asyncio.sleep(0.1)

    async def _streamed(self, prompt: list[int]) -> str:
        received = [list[int]() for _ in range(NUM_SAMPLES)]
        options = RolloutOptions(**OPTIONS, stream_tokens=True)
        async for record in self._client.stream([prompt], **options):
            if isinstance(record, TokensRecord):
                if record.start != len(received[record.index]):
                    self.violations.append(f"tokens at {record.start} were lost or repeated")
                received[record.index] += record.token_ids
            elif isinstance(record, SampleRecord):
                tokens = list(record.sample.token_ids)
                if tokens != received[record.sample.index]:
                    self.violations.append("a sample differs from its streamed tokens")
        self._check(prompt, received)
        return "answered"

    async def _tree(self, prompt: list[int]) -> str:
        """A streamed tree, whose segments arrive once, and whose leaves are samples at its end."""
        segments, samples = set[str](), list[list[int]]()
        options = RolloutOptions(**GREEDY, branching=BRANCHING)
        async for record in self._client.stream([prompt], **options):
            if isinstance(record, SegmentRecord):
                segment = record.segment
                if segment.id in segments or segment.parent not in {None, *segments}:
                    self.violations.append(f"segment {segment.id} was repeated or has no parent")
                segments.add(segment.id)
            elif isinstance(record, SampleRecord):
                samples.append(list(record.sample.token_ids))
        if len(segments) != NUM_SEGMENTS:
            self.violations.append(f"a tree of {len(segments)} segments")
        self._check(prompt, samples)
        return "answered"

    async def _submitted(self, prompt: list[int]) -> str:
        """An asynchronous rollout that is fetched through any replica."""
        pending = await self._client.submit([prompt], **OPTIONS)
        result = await self._client.attach(pending.id).wait(120)
        self._check(prompt, [sample.token_ids.tolist() for sample in result.groups[0].samples])
        return "answered"

    async def _plain_request(self, prompt: list[int]) -> str:
        """A request without an idempotency key, by a client that only follows redirects."""
        request = rollout_request([prompt], **OPTIONS)
        body = request.model_copy(update={"stream": False}).model_dump_json()
        headers = {"Content-Type": "application/json"}
        url = f"{LoadBalancer.URL}/v1/rollouts"
        answer = await self._plain.post(url, content=body, headers=headers)
        if answer.status_code == 503 and not answer.history:
            await asyncio.sleep(0.1)
            return "refused by all replicas"
        answer.raise_for_status()
        samples = answer.json()["groups"][0]["samples"]
        self._check(prompt, [sample["token_ids"] for sample in samples])
        return "answered"

    async def _held_handle(self, prompt: list[int]) -> str:
        """Prompt KV that is read again and again during a lease, through any replica."""
        kv_options = Kv(lease_seconds=60)
        options = RolloutOptions(n=1, max_tokens=1, temperature=0.0, kv=kv_options)
        result = await self._client.rollout([prompt], **options)
        if (kv := result.groups[0].kv) is None:
            return f"no handle: {result.groups[0].kv_reason}"
        first = await self._file(kv.handle)
        ends_at = time.monotonic() + self._random.uniform(0.0, MAX_HELD_SECONDS)
        while time.monotonic() < ends_at:
            await asyncio.sleep(0.2)
            if await self._file(kv.handle) != first:
                self.violations.append("the bytes of a handle have changed")
        answer = await self._request("DELETE", f"/v1/kv/{kv.handle}")
        answer.raise_for_status()
        return "answered"

    async def _session(self, prompt: list[int]) -> str:
        """An agent session, whose result must have each turn once, and the agent's reward."""
        reward = float(len(prompt))
        created = await self._client.sessions.create(**SESSION_OPTIONS)
        (agent,), messages = created.sessions, list[Message]()
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"turn {turn}"})
            messages.append({"role": "assistant", "content": await self._respond(agent, messages)})
            await asyncio.sleep(self._random.uniform(0.0, 0.5))
        result = await self._client.sessions.finish(agent.id, reward=reward)
        if (len(result.turns), result.reward) != (NUM_TURNS, reward):
            self.violations.append(f"a session of {len(result.turns)} turns")
        return "answered"

    async def _respond(self, agent: AgentSession, messages: Sequence[Message]) -> str:
        """Response to an agent, whose request is refused while its session moves."""
        url = f"{LoadBalancer.URL}{httpx.URL(agent.openai_url).path}/chat/completions"
        ends_at = time.monotonic() + MAX_TURN_SECONDS
        while True:
            headers = {"x-api-key": agent.key}
            answer = await self._plain.post(url, json={"messages": messages}, headers=headers)
            if answer.status_code != 503 or time.monotonic() > ends_at:
                break
            await asyncio.sleep(0.05)
        answer.raise_for_status()
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    async def _file(self, handle: str) -> bytes:
        answer = await self._request("GET", f"/v1/kv/{handle}/data")
        answer.raise_for_status()
        return answer.content

    async def _request(self, method: str, path: str) -> httpx.Response:
        """Response to a request that is repeated after a broken connection, as by `KvSource`."""
        for _ in range(MAX_ATTEMPTS - 1):
            with suppress(httpx.TransportError):
                return await self._plain.request(method, LoadBalancer.URL + path)
            await asyncio.sleep(0.1)
        return await self._plain.request(method, LoadBalancer.URL + path)

    def _check(self, prompt: list[int], samples: Sequence[Sequence[int]]) -> None:
        if [len(tokens) for tokens in samples] != [MAX_TOKENS] * NUM_SAMPLES:
            self.violations.append(f"samples of {list(map(len, samples))} tokens")
        for tokens in samples:
            self.reports.add(TokenReport(0, tuple(prompt), tuple(tokens)))
