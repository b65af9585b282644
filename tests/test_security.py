"""Forbidden constructs in the sources, and leaks of prompts and paths in a server's output."""

import ast
import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.observability.logs import JsonFormatter
from tests.fake_engine import FakeEngine
from tests.service.sessions.agents import Agent, training
from tests.serving import Served, serving

ROOT = Path(__file__).parents[1]
SOURCES = [
    file
    for folder in ("service", "engine", "client", "kernels")
    for file in sorted((ROOT / folder).rglob("*.py"))
]
CANARY = "canary-5d1f"
SHORT = {"sampling": {"max_tokens": 4}}

# Untrusted bytes must not become code: formats are JSON, YAML's safe subset and safetensors.
MODULES = {
    "_pickle", "cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve",
}  # fmt: skip
CALLS = {
    "compile", "eval", "exec", "__import__", "torch.load", "os.system", "os.popen", "yaml.load",
    "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "ForkingPickler", "copyreg.pickle",
}  # fmt: skip
OPTIONS = {"allow_pickle": True, "shell": True, "trust_remote_code": True, "weights_only": False}


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name for name in full if name.split(".")[0] in MODULES or name in CALLS)
        elif isinstance(node, ast.Call):
            yield from _faults_of_call(node)


def _faults_of_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in CALLS or name.split(".")[-1] == "ForkingPickler":
        yield name
    for keyword in call.keywords:
        if keyword.arg in OPTIONS and not _is_not(keyword.value, OPTIONS[keyword.arg]):
            yield f"{name}({keyword.arg}=...)"


def _is_not(value: ast.expr, forbidden: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is (not forbidden)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_source_deserializes_bytes_into_code(file: Path) -> None:
    assert list(faults(ast.parse(file.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as p, json",
        "from pickle import loads",
        "from torch import load",
        "import cloudpickle.fast",
        "torch.load(f)",
        "eval(x)",
        "exec(x)",
        "yaml.load(x)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(m, trust_remote_code=True)",
        "reduction.ForkingPickler(x)",
    ],
)
def test_search_finds_forbidden_constructs(code: str) -> None:
    assert list(faults(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["import json", "yaml.safe_load(x)", "run(x, shell=False)", "np.load(allow_pickle=False)"],
)
def test_search_accepts_safe_constructs(code: str) -> None:
    assert not list(faults(ast.parse(code)))


# No prompt text in logs and problem documents


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Every log record as the JSON that would be written, with tracebacks and extra fields."""
    lines: list[str] = []
    formatter = JsonFormatter()

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(formatter.format(record))

    handler = Lines()
    # vLLM's own logs have requests at the level debug, which the server's settings never give it.
    with caplog.at_level("DEBUG"), caplog.at_level("INFO", logger="vllm"):
        logging.getLogger().addHandler(handler)
        yield lines
        logging.getLogger().removeHandler(handler)


def prompts() -> list[Any]:
    """Requests with the canary in every field that can hold a prompt, a response or a name."""
    text, long = {"text": CANARY}, {"text": CANARY * 200}
    messages = {"messages": [{"role": "user", "content": CANARY}]}
    return [
        *({"groups": [{"prompt": prompt}], **SHORT} for prompt in (text, messages, long)),
        {"groups": [{"prompt": text, "id": CANARY}], "stream": True, **SHORT},
        {"groups": [{"prompt": {**text, **messages}}]},
        {"groups": [{"prompt": CANARY}]},
        {"groups": [{"prompt": {"text": [CANARY]}}]},
        {"groups": [{"prompt": {"token_ids": [CANARY]}}]},
        {"groups": [{"prompt": {"messages": [{"role": CANARY, "content": CANARY}]}}]},
        {"groups": [{"prompt": text, "n": CANARY}]},
        {"groups": [{"prompt": text, "n": 0}], "sampling": {"max_tokens": -1}},
        {"groups": [{"prompt": text}], "sampling": {"stop": CANARY}},
        {"groups": [{"prompt": text}], "weights": {"exact_version": "v9"}},
        [CANARY],
        CANARY,
    ]


async def post(served: Served, asked: Any, path: str = "/v1/rollouts") -> httpx.Response:
    return await served.http.post(path, content=json.dumps(asked))


async def test_prompt_text_is_in_no_log_and_no_problem(tmp_path: Path, logged: list[str]) -> None:
    problems = []
    async with serving(FakeEngine(), tmp_path) as served:
        for asked in prompts():
            answer = await post(served, asked)
            if answer.status_code != 200:
                problems.append(answer.text)
        truncated = json.dumps(prompts()[0])[:-3]
        problems.append((await served.http.post("/v1/rollouts", content=truncated)).text)
        response = {"prompt": {"text": CANARY}, "responses": [[CANARY]]}
        problems.append((await post(served, {"items": [response]}, "/v1/score")).text)
    assert len(problems) >= 12
    assert not [text for text in problems if CANARY in text]
    assert len(logged) > 5
    assert not [line for line in logged if CANARY in line]


class Clumsy(FakeEngine):
    """Fails to encode every prompt."""

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise RuntimeError("cannot encode this")


class Dying(FakeEngine):
    async def submit(self, samples: Any) -> Any:
        self.alive = False
        return await super().submit(samples)


@pytest.mark.parametrize("engine", [Clumsy, Dying], ids=["failing", "dying"])
async def test_engine_failure_reveals_no_prompt(
    tmp_path: Path, logged: list[str], engine: type[FakeEngine]
) -> None:
    async with serving(engine(), tmp_path) as served:
        answer = await post(served, prompts()[0])
    assert answer.status_code >= 500
    assert CANARY not in answer.text
    assert "Traceback" not in answer.text
    assert not [line for line in logged if CANARY in line]


AGENT_ROUTES = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}


def agent_bodies(path: str) -> Iterator[Any]:
    """Requests of agents, valid and not, with the canary in texts, tools and values of fields."""
    field = AGENT_ROUTES[path]
    text: Any = CANARY if field == "prompt" else [{"role": "user", "content": CANARY}]
    tool = {"name": CANARY, "description": CANARY, "parameters": {"type": CANARY}}
    base: dict[str, Any] = {"model": CANARY, "max_tokens": 2, field: text}
    yield from (base, {**base, "stream": True})
    for wrong in (CANARY, [{"role": CANARY, "content": CANARY}], {"role": CANARY}, [[CANARY]], 5):
        yield {**base, field: wrong}
    yield {**base, "tools": [{"type": "function", "function": tool, **tool}]}
    yield {**base, "tools": CANARY, "tool_choice": {"type": CANARY}}
    for name in ("n", "stop", "system", "temperature", "response_format"):
        yield {**base, name: [{"text": CANARY}]}
    yield {**base, field: CANARY * 400 if field == "prompt" else [*text, *text * 400]}


async def agent_answers(agent: Agent) -> list[httpx.Response]:
    bodies = [(path, body) for path in AGENT_ROUTES for body in agent_bodies(path)]
    answers = [await agent.post(path, body) for path, body in bodies]
    headers = {"authorization": f"Bearer {agent.key}", "content-type": "application/json"}
    for path, body in bodies[:: len(bodies) // 20]:
        cut = json.dumps(body)[:-3]
        answers.append(await agent.http.post(agent.url + path, content=cut, headers=headers))
        wrong = {"authorization": f"Bearer {CANARY}", "x-api-key": CANARY}
        answers.append(await agent.http.post(agent.url + path, json=body, headers=wrong))
    return answers


def is_refused_by_vllm(answer: httpx.Response) -> bool:
    """True if vLLM has refused a request, whose wrong values it repeats to the caller."""
    body = answer.json()
    return answer.status_code in (400, 404) and {*body} <= {"type", "error", "request_id"}


@pytest.mark.parametrize("engine", [FakeEngine, Clumsy, Dying], ids=["well", "failing", "dying"])
async def test_texts_and_keys_of_sessions_are_in_no_log_and_no_error(
    tmp_path: Path, logged: list[str], engine: type[FakeEngine]
) -> None:
    async with training(tmp_path, engine()) as trainer:
        options: dict[str, Any] = {"metadata": {"task": CANARY}, "max_turns": 1000}
        ended, agent = await trainer.create(**options, **SHORT, n=2)
        assert (await agent.http.get(f"{ended.url}/v1/models")).status_code == 401
        await trainer.cancel(ended)
        answers = [*(await agent_answers(agent)), await ended.chat([{"role": CANARY}])]
        native = f"/v1/sessions/{agent.id}"
        finish = {"reward": CANARY, "metadata": CANARY}
        answers.append(await trainer.served.http.post(f"{native}/finish", json=finish))
        answers.append(await trainer.served.http.post("/v1/sessions", json={"sampling": CANARY}))
        if engine is FakeEngine:
            assert CANARY in json.dumps(await trainer.finish(agent, reward=1.0))
    found = {answer.status_code for answer in answers}
    assert {401, 422} <= found and (engine is Dying or {400, 410} <= found)
    errors = [answer for answer in answers if answer.status_code >= 400]
    assert not [answer.text for answer in errors if "Traceback" in answer.text]
    assert not [e.text for e in errors if CANARY in e.text and not is_refused_by_vllm(e)]
    assert len(logged) > 5
    assert not [line for line in logged for text in (CANARY, agent.key, ended.key) if text in line]


async def test_problem_documents_contain_no_path_and_no_address(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        texts = [
            (await served.http.get("/v1/weights/../../etc/passwd")).text,
            (await post(served, {"path": "/etc/passwd"}, "/v1/weights/v1")).text,
            (await post(served, {"path": str(tmp_path)}, "/v1/weights/v1")).text,
            (await served.http.put("/v1/weights/v1/files/..%2f..%2fx.safetensors")).text,
        ]
    for text in texts:
        assert json.loads(text)["code"] in {"not_found", "path_refused"}
        assert not any(part in text for part in ("/etc", str(tmp_path), "0x", ".py"))


# Only documented routes are served


async def test_service_has_no_route_outside_the_contract(tmp_path: Path) -> None:
    paths = yaml.safe_load((ROOT / "openapi.yaml").read_text())["paths"]
    guesses = [
        "/docs/", "/redoc", "/openapi.json", "/env", "/config", "/debug", "/v1/models",
        "/v1/completions", "/v1/chat/completions", "/collective_rpc", "/run_script", "/sleep",
        "/reset_prefix_cache", "/update_weights", "/server_info", "/metrics/", "/static/x",
    ]  # fmt: skip
    async with serving(FakeEngine(), tmp_path, server={"compat": ()}) as served:
        answers = await asyncio.gather(*(served.http.get(path) for path in guesses))
    assert set(guesses).isdisjoint(paths)
    assert {answer.json()["code"] for answer in answers} == {"not_found"}
