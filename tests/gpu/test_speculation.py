"""Speculation on a GPU, with a draft model and from siblings: drafts change no greedy token."""

from pathlib import Path

import pytest

from engine.weights.checkpoint import read_base_checkpoint
from tests.engine.drafter.drafter_engine import drafter_engine, num_accepted
from tests.engine.random_models import make_models
from tests.engine.seedling import reference
from tests.engine.speculation.drafting_engine import drafting_engine, in_group
from tests.gpu.device import CAN_RUN
from tests.gpu.live import ENGINE
from tests.gpu.test_engine import OTHERS, SHARED, judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CAN_RUN, reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


def test_drafter_is_lossless_and_can_be_reloaded(models: dict[str, Path]) -> None:
    """The served model is the first drafter and always right, the second is another model."""
    truth = reference(models["v7"])
    with drafter_engine(models["v7"], models["v7"], **ENGINE) as live:
        judge(truth, OTHERS, live.ask(*OTHERS, max_tokens=40))
        accepted = num_accepted(live)
        assert accepted > 0
        loaded = live.rpc("coppice_load_drafter", str(models["v8"]), str(models["v7"]))
        assert all(answer["ok"] for answer in loaded), loaded
        judge(truth, SHARED, live.ask(*SHARED, max_tokens=40))
        reloaded = live.rpc("coppice_load_drafter", str(models["v7"]), str(models["v8"]))
        assert reloaded[0]["num_tensors"] == len(read_base_checkpoint(models["v7"]).tensors)
        before = num_accepted(live)
        judge(truth, OTHERS, live.ask(*OTHERS, max_tokens=40))
        assert num_accepted(live) > before


def test_sibling_drafts_are_lossless(models: dict[str, Path], tmp_path: Path) -> None:
    truth = reference(models["v7"])
    with drafting_engine(models["v7"], tmp_path, **ENGINE) as (live, proposer):
        first = live.ask(SHARED[0], max_tokens=60, **in_group("g"))
        again = live.ask(*SHARED[:4], max_tokens=60, **in_group("g"))
        assert proposer.is_enabled and proposer.speculator is not None
    judge(truth, SHARED[:1], first)
    judge(truth, SHARED[:4], again)
