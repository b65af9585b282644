"""Start of sibling drafts, by the methods of EngineCore that the service calls."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.attention import register
from engine.attention.settings import AttentionSettings
from engine.runtime.process_environment import CACHE_ENV
from engine.speculation import settings as process_settings
from engine.speculation.baseline import profile_cache
from engine.speculation.core import engine_core_methods as methods
from engine.speculation.cost import Step
from engine.speculation.draft_message import lookup_length
from engine.speculation.settings import SpeculationSettings
from kernels.draft_index.compiled_store import is_built
from tests.engine.speculation.fake_gpu import text_model
from tests.engine.speculation.second_runner import LONGEST, PROMPT, Engine, add_group

pytestmark = pytest.mark.usefixtures("second_runner")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not is_built():
        pytest.skip("the draft store was not built")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(register, "_settings", AttentionSettings())
    monkeypatch.setattr(process_settings, "_settings", SpeculationSettings(mode="siblings"))
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    return tmp_path


def test_second_start_reads_the_profile_of_the_first(config: Any, folder: Path) -> None:
    first = Engine(config, text_model())
    assert methods.counted(first.core) is None
    assert methods.coppice_start_sibling_drafts(first.core) is True
    first.core.coppice_sibling_drafts._clock = first.executor.clock
    add_group(first, 2).run()
    methods.coppice_finish_sibling_profile(first.core)
    add_group(first, 2).run()
    assert first.core.coppice_sibling_drafts.store.num_tokens > 60
    second = Engine(config, text_model())
    assert methods.coppice_start_sibling_drafts(second.core) is False
    drafts = second.core.coppice_sibling_drafts
    assert drafts.is_enabled
    no_rows = drafts.store.step(*np.zeros((4, 0), np.int32))
    assert no_rows.tokens.shape[1] == lookup_length(LONGEST)
    assert methods.counted(second.core) is not None


def test_auto_drafts_nothing_where_the_profile_shows_no_gain(
    config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile of a card on which two tokens take twice the time of one."""
    auto = process_settings.process_settings().model_copy(update={"mode": "auto"})
    monkeypatch.setattr(process_settings, "_settings", auto)
    dear = [
        Step(running=1, context=64, verified=1 + length, seconds=0.01 * (1 + length))
        for length in (0, 1, 2, 4)
    ]
    profile_cache(config).write(dear)
    engine = Engine(config, text_model())
    assert methods.coppice_start_sibling_drafts(engine.core) is False
    add_group(engine).run()
    assert {tokens for shape in engine.executor.shapes for tokens in shape} == {1, len(PROMPT)}
    assert engine.core.coppice_sibling_drafts.num_rows == 0
