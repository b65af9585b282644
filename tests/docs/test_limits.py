"""The list of limits names all that the code has, and what it names exists."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.reference.limits import LIMITS, Limit, codes, constants
from service.config.settings import settings_fields
from tests.tools import ROOT

NO_LIMITS_OF_REQUESTS = {
    "service/auth/audit_log.py": {"MAX_LOGGED_CHARS"},
    "service/checkpoint_store.py": {"MAX_DELETION_WAIT_SECONDS"},
    "service/cluster/idempotency_keys.py": {"MAX_KEYS_PER_HEARTBEAT"},
    "service/cluster/redis_registry.py": {"MAX_CONNECTIONS"},
    "service/compat/serving/samples.py": {"MAX_DELTA_TOKENS"},
    "service/compat/sglang/generate.py": {"MAX_QUIET_SECONDS"},
    "service/http/open_file_limit.py": {"MAX_OPEN_FILES"},
    "service/kv/spans/prediction_sources.py": {
        "MAX_OBSERVATIONS_PER_SECTION",
        "MAX_CACHED_PAIRS",
    },
    "service/kv/spans/observations.py": {"MAX_OBSERVATIONS_PER_CONTEXT"},
    "service/kv/spans/predicted_prompt.py": {"MAX_SECTIONS"},
    "service/handoff/receiver.py": {"MAX_CANCELLED"},
    "service/handoff/rollout_state.py": {"MAX_COUNT", "MAX_DIGITS"},
    "service/handoff/sender.py": {"MAX_DETAIL"},
    "service/handoff/sessions.py": {"MAX_SEQUENCE_LEAD"},
    "service/observability/tracing.py": {"MAX_HEADER_BYTES", "MAX_SAMPLES"},
    "service/kv/arena.py": {"MAX_FREE_SHARE", "MAX_DEFAULT_BYTES"},
    "service/kv/handles/exports.py": {"MAX_POLL_SHARE"},
    "service/kv/handles/index.py": {"MAX_RELEASED_REMEMBERED"},
    "service/kv/handles/file_layout.py": {"MAX_TOKENS"},
    "service/sessions/history.py": {"MAX_PARSED_CHARS"},
    "service/sessions/kv_release.py": {"MAX_WAITING"},
    "service/sessions/addresses.py": {"MAX_LOOKUPS"},
    "service/status/dashboard_snapshot.py": {
        *("MAX_ROLLOUTS", "MAX_GROUPS", "MAX_SAMPLES", "MAX_ROWS"),
        *("MAX_LEASES", "MAX_VERSIONS"),
    },
    "service/status/session_snapshot.py": {"MAX_SESSIONS"},
    "service/status/tree_snapshot.py": {"MAX_SEGMENTS", "MAX_SPANS"},
    "service/weights_versions.py": {"MAX_SEQUENCE"},
}
"""Constants that limit the server's own work, what it shows, or other replicas."""


def maxima() -> Iterator[str]:
    """Names of the constants of service/ that may limit requests."""
    for path in (ROOT / "service").rglob("*.py"):
        place = str(path.relative_to(ROOT))
        own = NO_LIMITS_OF_REQUESTS.get(place, set())
        for name in constants(path):
            if name.startswith("MAX_") and name not in own:
                yield f"{place}:{name}"


def test_every_limit_is_listed() -> None:
    listed = [limit.name for limit in LIMITS]
    settings = {
        f"{section}.{name}"
        for section, name, _ in settings_fields()
        if section in ("limits", "sessions") or name.startswith("max_")
    }
    # Numbers of vLLM's scheduler, which requests wait for.
    settings -= {"engine.max_batched_tokens", "engine.max_sequences"}
    assert len(set(listed)) == len(listed)
    assert settings <= set(listed)
    assert set(maxima()) <= set(listed)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_listed_limit_exists_and_has_a_test(limit: Limit) -> None:
    name = limit.name.rpartition(":")[2] if limit.constant else limit.name.partition(".")[2]
    if limit.constant is not None:
        path, constant = limit.constant
        assert constant in constants(path)
    assert name in (ROOT / limit.module).read_text()
    file, _, test = limit.test.partition("::")
    assert test in functions(ROOT / file)


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_codes_of_problems_are_found() -> None:
    assert codes("quota_exceeded; overloaded, or the lease is shortened") == [
        "quota_exceeded",
        "overloaded",
    ]


def test_numbers_of_a_module_are_read_without_importing_it(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import x\nA_B = 2**20 - 1\nC: Final = 1.5\nD = x.y\nE = True\nf = 1\n")
    assert constants(module) == {"A_B": 2**20 - 1, "C": 1.5}
