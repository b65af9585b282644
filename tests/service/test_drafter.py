"""/v1/drafter, its metrics, and the client's methods for it."""

import re
from pathlib import Path

import pytest

from coppice import AsyncRollouts
from coppice.errors import NotFound, VersionConflict, WeightsRefused
from engine.errors import CheckpointRefused, DrafterRefused
from engine.types.feature_stats import DrafterPairStats, DrafterStatus
from tests.fake_engine import FakeEngine
from tests.service.test_weights import digest_of
from tests.serving import serving

PAIR = DrafterPairStats(
    drafter="d1", weights="v0", drafted=40, accepted=10, first_drafted=20, first_accepted=8
)
STATUS = DrafterStatus(
    serving="d1",
    candidate="d2",
    pairs=(PAIR,),
    outcomes={"promoted": 2, "rolled_back": 1},
    training="running",
    num_steps=30,
    num_tokens=4000,
    loss=1.5,
    samples_dropped=3,
)


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    engine = FakeEngine()
    engine.drafting = STATUS
    engine.drafter_path = tmp_path / "d1.safetensors"
    engine.drafter_path.write_bytes(b"tensors" * 1000)
    return engine


async def test_drafter_can_be_downloaded_and_queried(engine: FakeEngine, tmp_path: Path) -> None:
    async with serving(engine, tmp_path) as served:
        file = await served.http.get("/v1/drafter")
        assert file.headers["coppice-drafter-version"] == "d1"
        assert file.content == engine.drafter_path.read_bytes()
        told = await served.http.get("/v1/drafter", headers={"Accept": "application/json"})
        assert told.json()["serving"] == "d1"
        assert told.json()["acceptance"][0]["num_first_tokens_accepted"] == 8
        assert told.json()["training"]["state"] == "running"
        refused = await served.http.get("/v1/drafter", headers={"Accept": "text/html"})
        assert refused.status_code == 406


async def test_uploaded_drafter_is_validated_and_starts_its_ab_test(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with serving(engine, tmp_path) as served:
        taken = await served.http.put(
            "/v1/drafter/mine", content=b"bytes", headers=digest_of(b"bytes")
        )
        assert (taken.status_code, taken.json()["candidate"]) == (202, "d2")
        assert engine.offered == [("mine", b"bytes")]
        wrong = await served.http.put("/v1/drafter/x", content=b"a", headers=digest_of(b"b"))
        assert (wrong.status_code, wrong.json()["code"]) == (422, "digest_mismatch")
        unnamed = await served.http.put("/v1/drafter/-x", content=b"a")
        assert (unnamed.status_code, unnamed.json()["code"]) == (422, "invalid_request")
        assert not list((tmp_path / "weights").rglob(".incoming-*"))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CheckpointRefused("shape: a"), 422, "weights_refused"),
        (DrafterRefused("on trial"), 409, "version_conflict"),
    ],
)
async def test_refused_drafter_leaves_nothing(
    engine: FakeEngine, tmp_path: Path, error: CheckpointRefused, status: int, code: str
) -> None:
    engine.refused_drafter = error
    async with serving(engine, tmp_path) as served:
        refused = await served.http.put("/v1/drafter/mine", content=b"bytes")
        assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert refused.json()["detail"] == str(error)
        assert not list((tmp_path / "weights").rglob(".incoming-*"))


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_without_a_draft_model_there_is_no_drafter(tmp_path: Path, method: str) -> None:
    path = "/v1/drafter" + ("/mine" if method == "PUT" else "")
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.request(method, path, content=b"x")
        assert (answer.status_code, answer.json()["code"]) == (404, "no_drafter")


async def test_client_gets_uploads_and_downloads_drafters(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        assert (await rollouts.drafter()).training.num_tokens == 4000
        assert await rollouts.download_drafter(tmp_path / "home") == "d1"
        assert (tmp_path / "home").read_bytes() == engine.drafter_path.read_bytes()
        assert (await rollouts.upload_drafter("mine", tmp_path / "home")).candidate == "d2"
        assert engine.offered == [("mine", engine.drafter_path.read_bytes())]
        engine.refused_drafter = DrafterRefused("on trial")
        with pytest.raises(VersionConflict):
            await rollouts.upload_drafter("other", tmp_path / "home")
        engine.refused_drafter = CheckpointRefused("no")
        with pytest.raises(WeightsRefused):
            await rollouts.upload_drafter("other", tmp_path / "home")
        engine.drafting = None
        with pytest.raises(NotFound):
            await rollouts.drafter()


async def test_metrics_show_acceptance_of_drafters_and_count_ab_tests(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with serving(engine, tmp_path) as served:
        before = (await served.http.get("/metrics")).text
        assert 'coppice_drafter_acceptance_ratio{drafter="d1",weights="v0"} 0.25' in before
        engine.drafting = DrafterStatus(
            serving="d2",
            pairs=(
                DrafterPairStats(
                    drafter="d2",
                    weights="v1",
                    drafted=4,
                    accepted=2,
                    first_drafted=4,
                    first_accepted=2,
                ),
            ),
            outcomes={"promoted": 5, "rolled_back": 1},
            training="paused",
            num_tokens=5000,
            loss=1.25,
            samples_dropped=4,
        )
        metrics = (await served.http.get("/metrics")).text
    wanted = {
        'acceptance_ratio{drafter="d2",weights="v1"}': 0.5,
        'trials_total{outcome="promoted"}': 5,
        'trials_total{outcome="rolled_back"}': 1,
        'trials_total{outcome="failed"}': 0,
        'training{state="paused"}': 1,
        'training{state="running"}': 0,
        "trained_tokens": 5000,
        "loss": 1.25,
        "samples_dropped_total": 4,
    }
    for name, value in wanted.items():
        [found] = re.findall(rf"^coppice_drafter_{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
        assert float(found) == value
    assert 'drafter="d1"' not in metrics
