"""Speculation on a GPU, with a draft model and from siblings: drafts change no greedy token."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from engine.attention import register as attention
from engine.attention.settings import AttentionSettings
from engine.runtime.process_environment import CACHE_ENV
from engine.speculation import settings as process_settings
from engine.speculation.controller import Draft, Int32Array
from engine.speculation.core.scheduler_drafts import FEATURE, SchedulerDrafts
from engine.speculation.counters import COUNTERS
from engine.speculation.settings import SpeculationSettings
from engine.speculation.startup import GPU_METHOD
from tests.engine.drafter.drafter_engine import drafter_engine, drafts, num_accepted
from tests.engine.random_models import make_models
from tests.engine.seedling import reference
from tests.engine.speculation.drafting_engine import (
    LONGEST,
    SendAllDrafts,
    SendUniformDrafts,
    in_group,
)
from tests.engine.stepped_engine import LiveEngine
from tests.gpu.device import CAN_RUN, ON_GPU
from tests.gpu.live import ENGINE, engine
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
        assert reloaded[0]["num_bytes"] > 0
        before = num_accepted(live)
        judge(truth, OTHERS, live.ask(*OTHERS, max_tokens=40))
        assert num_accepted(live) > before


class SwitchedDrafts(SendAllDrafts):
    """No drafts and no probes until `sends` is set, then all drafts."""

    sends = False

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        if self.sends:
            return super().lengths(drafted, running=running, context=context)
        self.decision = "baseline"
        return np.zeros_like(drafted.lengths)


def test_drafts_are_accepted_after_steps_in_which_the_draft_model_did_not_run(
    models: dict[str, Path],
) -> None:
    """The served model drafts for itself, so its drafts are wrong only if its KV cache is."""
    controller = SwitchedDrafts()
    with drafter_engine(models["v7"], models["v7"], controller=controller, **ENGINE) as live:
        names = [live.submit(prompt, max_tokens=60) for prompt in OTHERS]
        live.step(24)
        assert num_accepted(live) == 0
        controller.sends = True
        answers = live.finish(*names)
        drafted, accepted = sum(drafts(live)["drafted"].values()), num_accepted(live)
    judge(reference(models["v7"]), OTHERS, answers)
    assert drafted > 20 and accepted > 0.8 * drafted


@contextmanager
def sibling_engine(model: Path, folder: Path) -> Iterator[tuple[LiveEngine, SchedulerDrafts]]:
    """An engine that drafts from siblings as on a GPU, and verifies every draft."""
    os.environ[CACHE_ENV] = str(folder)
    process_settings.install(SpeculationSettings(mode="siblings", longest_draft=LONGEST))
    attention.install(AttentionSettings(shared_prefix="off"))
    rows = ENGINE["max_num_seqs"]
    lengths = [(1, 1, 4), (2, 2, 2), (3, 3, 1), (4, rows, 0)]
    config = {
        "method": GPU_METHOD,
        "num_speculative_tokens": LONGEST,
        "num_speculative_tokens_per_batch_size": lengths,
    }
    with engine(model, speculative_config=config) as live:
        assert live.core.coppice_start_sibling_drafts() is True
        live.core.coppice_finish_sibling_profile()
        drafts = live.core.coppice_sibling_drafts
        drafts.controller = SendUniformDrafts()
        yield live, drafts


@pytest.mark.skipif(not ON_GPU, reason="Model Runner V2 runs on a GPU only")
def test_sibling_drafts_are_lossless_with_async_scheduling_and_full_graphs(
    models: dict[str, Path], tmp_path: Path
) -> None:
    truth = reference(models["v7"])
    with sibling_engine(models["v7"], tmp_path) as (live, drafts):
        config = live.core.vllm_config
        assert config.use_v2_model_runner and config.scheduler_config.async_scheduling
        assert config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        before = sum(COUNTERS.read()["accepted"].values())
        first = live.ask(SHARED[0], max_tokens=60, **in_group("g"))
        again = live.ask(*SHARED[:4], max_tokens=60, **in_group("g"))
        assert sum(COUNTERS.read()["accepted"].values()) > before + 30
        assert drafts.is_enabled and FEATURE.state.on
    judge(truth, SHARED[:1], first)
    judge(truth, SHARED[:4], again)
