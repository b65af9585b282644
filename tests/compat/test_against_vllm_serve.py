"""Equal requests to `vllm serve` and to this server, both over one model: equal responses.

The table "Differences from vllm serve" of docs/migrate/vllm-serve.md lists the differences that are
allowed; `ALLOWED` has the test of each.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bench.harness.server_process import coppice_server, vllm_server
from engine.openai_server import sampling
from tests.compat import generated_other_wires as others
from tests.compat import generated_wires as wires
from tests.compat.compared_responses import Different, content, differences
from tests.compat.generated_requests import CONTEXT_TOKENS, MODEL, GeneratedRequest
from tests.engine.seedling import MODEL as MODEL_PATH

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "vllm-serve.md"
FEW, MANY = 16, 400
"""Requests of each wire."""
AT_ONCE = 4
MODEL_ROOT = ".body.data[0].root"
REFUSED = frozenset({"use_beam_search", "background", "features"} | sampling.REFUSED.keys())
WIRES: Mapping[str, Callable[[Random], GeneratedRequest]] = {
    "chat": wires.chat,
    "completions": wires.completions,
    "responses": wires.responses,
    "messages": others.messages,
    "count_tokens": others.count_tokens,
    "generate": others.generate,
    "tokenize": others.tokenize,
    "detokenize": others.detokenize,
}


@dataclass(slots=True, kw_only=True)
class Pair:
    """A request and the two responses to it."""

    request: GeneratedRequest
    theirs: dict[str, Any]
    ours: dict[str, Any]

    @property
    def error(self) -> Mapping[str, Any]:
        """The error that vLLM's server has sent, also as the only event of a stream."""
        body = self.theirs["body"]
        if isinstance(body, list):
            body = next((p["joined"] for p in body if "error" in (p["joined"] or ())), {})
        return body.get("error") or {} if isinstance(body, dict) else {}

    @property
    def is_refused_only_here(self) -> bool:
        return bool(self.theirs["status"] == 200 and self.ours["status"] == 400)

    def given(self, name: str) -> Any:
        """A field of the request, or of its sampling parameters."""
        params = self.request.body.get("sampling_params")
        own = params if isinstance(params, dict) else {}
        return own.get(name, self.request.body.get(name))

    def sets(self, *names: str) -> bool:
        return any(self.given(name) not in (None, False, [], {}) for name in names)


def differences_of(pair: Pair) -> list[Different]:
    """All differences, but for the names of token ids in our logprobs of /inference/v1/generate."""
    return [
        (path, theirs, ours)
        for path, theirs, ours in differences(pair.theirs, pair.ours)
        if not (
            pair.request.path == GENERATE
            and path.endswith(".token")
            and (theirs, str(ours)[:9]) == ("missing", "token_id:")
        )
    ]


def broke_off(pair: Pair) -> bool:
    """vLLM's server has failed: an exception that it does not expect."""
    return bool(pair.error.get("code", pair.theirs["status"]) == 500)


def other_text(pair: Pair) -> bool:
    """Both refuse with the same status; this server has its own text."""
    is_own = pair.ours["content-type"] == "application/problem+json"
    return bool(is_own and pair.theirs["status"] == pair.ours["status"] < 500)


def status_of_stream(pair: Pair) -> bool:
    """vLLM's server sends an error as the first event of a stream, this one as a response."""
    is_stream = pair.theirs["content-type"] == "text/event-stream"
    return bool(is_stream and pair.error.get("code") == pair.ours["status"])


def refused_field(pair: Pair) -> bool:
    error = pair.ours["body"].get("error") if pair.ours["status"] == 400 else None
    return bool(error and "not supported" in error["message"] and pair.sets(*REFUSED))


def limit(pair: Pair) -> bool:
    """More than the service's limit of a sampling parameter."""
    stop, penalty = pair.given("stop"), pair.given("repetition_penalty")
    return pair.is_refused_only_here and (
        (isinstance(stop, list) and len(stop) > 64)
        or (isinstance(penalty, int | float) and not 0.01 <= penalty <= 100)
    )


def cut_of_chunks(pair: Pair) -> bool:
    """All differences are those that vLLM makes of the cut of tokens into chunks.

    Logprobs of tokens without text are left out of a chunk without text.
    """

    def is_of_chunks(path: str, theirs: Any, ours: Any) -> bool:
        if path.endswith(".logprobs") and isinstance(theirs, list) and isinstance(ours, list):
            common = min(len(theirs), len(ours))
            return common > 0 and not list(differences(theirs[:common], ours[:common]))
        return path.endswith(".reasoning_tokens")

    found = differences_of(pair)
    return pair.sets("stream") and all(is_of_chunks(*each) for each in found)


GENERATE = "/inference/v1/generate"
ALWAYS = (f"token in logprobs of {GENERATE}", "the root of /v1/models")
ALLOWED: Mapping[str, Callable[[Pair], bool]] = {
    "text of refusals": other_text,
    "errors before the first token of a stream": status_of_stream,
    "fields that are refused": refused_field,
    "limits of sampling parameters": limit,
    "failures of vLLM": broke_off,
    "reasoning_tokens and last logprobs of streams": cut_of_chunks,
}


@dataclass(frozen=True, slots=True)
class Servers:
    theirs: httpx.AsyncClient
    ours: httpx.AsyncClient

    async def pair(self, request: GeneratedRequest) -> Pair:
        theirs, ours = [await _sent(http, request) for http in (self.theirs, self.ours)]
        return Pair(request=request, theirs=theirs, ours=ours)


@dataclass(slots=True)
class Found:
    """Differences that the pairs of a wire have shown."""

    wrong: list[str] = field(default_factory=list)
    allowed: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)

    def add(self, pair: Pair) -> None:
        self.statuses[pair.theirs["status"]] += 1
        found = differences_of(pair)
        if not found:
            return
        name = next((name for name, holds in ALLOWED.items() if holds(pair)), None)
        if name is not None:
            self.allowed[name] += 1
        else:
            listed = "\n".join(f"  {p}: {str(a)[:200]} != {str(b)[:200]}" for p, a, b in found[:4])
            self.wrong.append(f"{json.dumps(pair.request.body)}\n{listed}")


async def _sent(http: httpx.AsyncClient, request: GeneratedRequest) -> dict[str, Any]:
    body, headers = json.dumps(request.body), {"Content-Type": "application/json"}
    try:
        return content(await http.post(request.path, content=body, headers=headers))
    except httpx.RemoteProtocolError:  # an exception has broken the stream off
        return {"status": 500, "content-type": "", "body": None}


def vllm_options() -> dict[str, object]:
    return {
        "--model": MODEL_PATH,
        "--served-model-name": MODEL,
        "--dtype": "float32",
        "--seed": 0,
        "--max-model-len": CONTEXT_TOKENS,
        "--max-num-seqs": 64,
        "--block-size": 32,
        "--kv-cache-memory-bytes": 2**27,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": 20,
        "--generation-config": "vllm",
        "--tool-call-parser": "hermes",
        "--reasoning-parser": "qwen3",
        **dict.fromkeys(
            (
                *("--enable-auto-tool-choice", "--enable-prompt-tokens-details"),
                *("--enable-scale-out", "--enforce-eager"),
            )
        ),
    }


def our_options(directory: Path) -> dict[str, object]:
    engine = {
        "served-model-name": MODEL,
        "dtype": "float32",
        "seed": 0,
        "max-context-tokens": CONTEXT_TOKENS,
        "max-sequences": 64,
        "block-size": 32,
        "cache-bytes": 2**27,
        "max-logprobs": 20,
        "tool-parser": "hermes",
        "reasoning-parser": "qwen3",
        "eager": "true",
        "cpu-threads": 1,
    }
    options = {f"--engine.{name}": value for name, value in engine.items()}
    return {"--model": MODEL_PATH, "--weights.directory": directory / "weights", **options}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        starts = (
            vllm_server(vllm_options(), {"OMP_NUM_THREADS": "1"}),
            coppice_server(our_options(tmp_path_factory.mktemp("served"))),
        )
        urls = await asyncio.gather(*map(stack.enter_async_context, starts))
        # After an unexpected exception uvicorn closes the connection.
        limits = httpx.Limits(max_keepalive_connections=0)
        clients = [httpx.AsyncClient(base_url=url, timeout=120, limits=limits) for url in urls]
        yield Servers(*[await stack.enter_async_context(client) for client in clients])


async def compared(servers: Servers, wire: str, number: int, seed: int) -> Found:
    found, draw = Found(), Random(f"{wire} {seed}")
    requests = iter([WIRES[wire](draw) for _ in range(number)])

    async def send_some() -> None:
        for request in requests:
            found.add(await servers.pair(request))

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send_some())
    return found


def check(found: Found, number: int) -> None:
    assert not found.wrong, "\n".join((f"{len(found.wrong)} of {number}", *found.wrong[:5]))
    assert found.statuses[200] > number / 3
    assert sum(found.allowed.values()) <= number / 5, found.allowed


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("wire", WIRES)
async def test_responses_are_those_of_vllm_serve(servers: Servers, wire: str) -> None:
    check(await compared(servers, wire, FEW, seed=1), FEW)


@pytest.mark.exhaustive
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("wire", WIRES)
async def test_many_responses_are_those_of_vllm_serve(servers: Servers, wire: str) -> None:
    check(await compared(servers, wire, MANY, seed=2), MANY)


@pytest.mark.asyncio(loop_scope="module")
async def test_models_are_those_of_vllm_serve(servers: Servers) -> None:
    theirs, ours = [
        content(await http.get("/v1/models")) for http in (servers.theirs, servers.ours)
    ]
    assert ours["body"]["data"][0]["permission"]
    assert [path for path, *_ in differences(theirs, ours)] == [MODEL_ROOT]


def test_allowed_differences_are_those_of_the_page() -> None:
    section = (
        PAGE.read_text().partition("## Differences from `vllm serve`")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| ([^|]+?) \| tested", section, re.MULTILINE)
    assert [row.replace("`", "") for row in rows] == [*ALLOWED, *ALWAYS]
