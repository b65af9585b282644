"""What schemathesis makes of openapi.yaml, sent to the app: valid, invalid and in sequences.

Always the same requests: the seed is fixed and nothing is remembered. The server is a real one on a
socket, in a thread, because its rollouts outlive single requests.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.openapi import from_path

from engine.protocol import EngineFacts
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.serving_thread import serving_in_thread

Case = schemathesis.Case[Any]
EXAMPLES = 25
SEQUENCES = 15
# A valid request may be one that this server cannot serve, or not yet; no field is to blame then.
UNSERVABLE = {
    "startRollout": ["422", "503"],
    "score": ["422", "503"],
    "stageWeights": ["422"],
    "uploadWeights": ["422"],
    "uploadWeightsFile": ["422"],
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
            # By the links that the contract has, not by those that names suggest: a rollout that
            # was waited for is not kept.
            "phases": {"stateful": {"inference": {"algorithms": []}}},
            "generation": {"deterministic": True, "database": "none", "max-examples": EXAMPLES},
            "operations": [ended, *(_unservable(*entry) for entry in UNSERVABLE.items())],
        }
    )


CONTRACT = from_path(Path(__file__).parents[2] / "openapi.yaml", config=_config())


class Obliging(FakeEngine):
    """Knows every token and takes every message, so that few requests are refused for what they
    mean."""

    def __init__(self) -> None:
        super().__init__(max_context_tokens=200)

    @property
    def facts(self) -> EngineFacts:
        return replace(super().facts, vocab_size=2**31)

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [len(messages) % 256]


@dataclass(frozen=True)
class Target:
    url: str
    headers: dict[str, str]

    @property
    def options(self) -> dict[str, Any]:
        return {"base_url": self.url, "headers": self.headers}

    def resume(self) -> None:
        requests.post(f"{self.url}/v1/resume", headers=self.headers, timeout=10)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("schemathesis")
    key = write_keys(folder / "keys.yaml", everything="rollout,kv,admin")["everything"]
    sections: dict[str, dict[str, Any]] = {
        "server": {"keys_file": folder / "keys.yaml"},
        "limits": {"max_samples_per_request": 64},
    }
    with serving_in_thread(Obliging(), folder, **sections) as url:
        yield Target(url, bearer(key))


@CONTRACT.parametrize()
@BOUNDED
def test_every_operation_keeps_the_contract(case: Case, target: Target) -> None:
    response = case.call_and_validate(**target.options)
    if response.status_code == 422 and _is_valid(case):
        assert "errors" not in response.json(), "a valid request has no field to blame"
    if case.operation.path == "/v1/pause":
        target.resume()


def test_sequences_of_requests_keep_the_contract(target: Target) -> None:
    machine = CONTRACT.exclude(operation_id="pause").as_state_machine()

    class Workflow(machine):  # type: ignore[misc, valid-type]
        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            return target.options

    Workflow.run(settings=settings(BOUNDED, max_examples=SEQUENCES))


def _is_valid(case: Case) -> bool:
    """Every part of it: schemathesis fills up cases that it calls valid with parts that are not."""
    assert case.meta is not None
    modes = [case.meta.generation.mode, *(part.mode for part in case.meta.components.values())]
    return all(mode.is_positive for mode in modes)
