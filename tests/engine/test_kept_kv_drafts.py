"""KV that chains keep across weights updates, in an engine that drafts."""

from pathlib import Path

import pytest

from tests.engine.random_models import make_models
from tests.engine.stepped_engine import live_engine
from tests.engine.test_kept_kv import BLOCK, first_turn
from tests.engine.upstream_defects import SPECULATION

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_drafts_change_neither_tokens_nor_versions_of_kept_kv(tmp_path: Path) -> None:
    models = make_models(tmp_path, tied=True)
    found = []
    for settings in ({}, SPECULATION):
        with live_engine(models["v7"], **settings) as engine:
            tokens = first_turn(engine)
            engine.swap(models["v8"], keep_kv=True)
            [answer] = engine.ask(tokens[: 4 * BLOCK] + [9], max_tokens=40, chain="a")
            found.append(answer)
    plain, drafted = found
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert [span.version for span in drafted.kv_versions] == ["v7", "v8"]
    assert drafted.kv_versions[-1].end == plain.kv_versions[-1].end == 4 * BLOCK + 1 + 39
