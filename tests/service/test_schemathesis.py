"""What schemathesis makes of openapi.yaml, sent to the app: valid, invalid and in sequences.

Always the same requests: the seed is fixed and nothing is remembered. The server is a real one on a
socket, in a thread, because its rollouts outlive single requests.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Response
from schemathesis.openapi import from_path

from engine.protocol import ChatRequest, EngineInfo
from tests.fake_engine import FakeEngine
from tests.service.keyfile import write_keys
from tests.serving_thread import serving_in_thread

pytestmark = pytest.mark.slow

Case = schemathesis.Case[Any]
EXAMPLES = 25
SEQUENCES = 12
START = "POST /v1/rollouts"
# What is only reached by following links.
LINKED = {
    ("GET /v1/rollouts/{rollout_id}", 200),
    ("DELETE /v1/rollouts/{rollout_id}", 200),
    ("POST /v1/weights/{version}/activate", 200),
    ("DELETE /v1/weights/{version}", 204),
}
# A valid request may be one that this server cannot serve, or not yet; no field is to blame then.
UNSERVABLE = {
    "startRollout": ["422", "503"],
    "branchRollout": ["422", "503"],
    "score": ["422", "503"],
    "stageWeights": ["422"],
    "uploadWeights": ["422"],
    "uploadWeightsFile": ["422"],
    "loadAdapter": ["422"],
    "uploadAdapter": ["422"],
}
BOUNDED = settings(
    max_examples=EXAMPLES,
    stateful_step_count=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def _unservable(operation: str, statuses: list[str]) -> dict[str, Any]:
    checks = {
        "positive_data_acceptance": {"expected-statuses": ["2xx", "404", "409", *statuses]},
        "not_a_server_error": {"expected-statuses": ["2xx", "4xx", *statuses]},
    }
    return {"include-operation-id": operation, "checks": checks}


def _config() -> schemathesis.Config:
    # DELETE ends a rollout and keeps what it has: it may be read afterwards.
    ended = {"include-operation-id": "getRollout", "checks": {"use_after_free": {"enabled": False}}}
    return schemathesis.Config.from_dict(
        {
            "seed": 1,
            "request-timeout": 60,
            # By the links that the contract has, not by those that names suggest: a rollout that
            # was waited for is not kept.
            "phases": {
                "stateful": {"inference": {"algorithms": []}, "generation": {"mode": "positive"}}
            },
            "generation": {"deterministic": True, "database": "none", "max-examples": EXAMPLES},
            "operations": [ended, *(_unservable(*entry) for entry in UNSERVABLE.items())],
        }
    )


CONTRACT = from_path(Path(__file__).parents[2] / "openapi.yaml", config=_config())


class Obliging(FakeEngine):
    """Knows every token and takes every message, so that few requests are refused for what they
    mean."""

    def __init__(self) -> None:
        super().__init__(max_context_tokens=48)

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, vocab_size=2**31)

    def encode_chat(self, conversation: ChatRequest) -> list[int]:
        return [len(conversation.messages) % 256]


@dataclass(frozen=True)
class ServerList:
    url: str
    headers: dict[str, str]

    @property
    def options(self) -> dict[str, Any]:
        return {"base_url": self.url, "headers": self.headers}

    def resume(self) -> None:
        requests.post(f"{self.url}/v1/resume", headers=self.headers, timeout=10)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerList]:
    with serving_target(tmp_path_factory.mktemp("schemathesis")) as target:
        yield target


@contextmanager
def serving_target(folder: Path) -> Iterator[ServerList]:
    key = write_keys(folder / "keys.yaml", everything="rollout,kv,admin")["everything"]
    sections: dict[str, dict[str, Any]] = {
        "server": {"keys_file": folder / "keys.yaml"},
        "weights": {"source_directories": [folder]},
        # Nobody comes back to what is opened here.
        "limits": {"max_tree_lease_seconds": 0.1},
    }
    with serving_in_thread(Obliging(), folder, **sections) as url:
        yield ServerList(url, {"Authorization": f"Bearer {key}"})


@CONTRACT.parametrize()
@BOUNDED
def test_every_operation_keeps_the_contract(case: Case, target: ServerList) -> None:
    response = case.call_and_validate(**target.options)
    if response.status_code == 422 and _is_valid(case):
        assert "errors" not in response.json(), (
            f"no field is to blame: {case.body!r} {response.json()}"
        )
    if case.operation.path == "/v1/pause":
        target.resume()


def test_sequences_of_requests_keep_the_contract(tmp_path: Path) -> None:
    """Each against a server of its own: what one has left would make the next one another."""
    seen: set[tuple[str, int]] = set()
    machine = CONTRACT.exclude(operation_id="pause").as_state_machine()

    class Workflow(machine):  # type: ignore[misc, valid-type]
        def setup(self) -> None:
            self.stack = ExitStack()
            self.target = self.stack.enter_context(serving_target(tmp_path))

        def teardown(self) -> None:
            self.stack.close()

        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            return self.target.options

        def before_call(self, case: Case) -> None:
            """What nobody could guess: the one path to stage from, and what Prefer knows."""
            if isinstance(case.body, dict) and "path" in case.body:
                case.body["path"] = str(tmp_path)
            if case.operation.label == START:
                case.headers["Prefer"] = "respond-async"

        def after_call(self, response: Response, case: Case) -> None:
            seen.add((case.operation.label, response.status_code))

    Workflow.run(settings=settings(BOUNDED, max_examples=SEQUENCES))
    assert seen >= LINKED, "no sequence has come that far"


def _is_valid(case: Case) -> bool:
    """Every part of it: schemathesis fills up cases that it calls valid with parts that are not."""
    assert case.meta is not None
    modes = [case.meta.generation.mode, *(part.mode for part in case.meta.components.values())]
    return all(mode.is_positive for mode in modes)
