"""Engines for all modules of this folder. Tests without an engine collect this file, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.stepped_engine import LiveEngine


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.engine.random_models import make_models

    return make_models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(
    scope="package", params=[pytest.param("plain", marks=pytest.mark.exhaustive), "drafting"]
)
def engine(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveEngine]:
    """An engine without drafts, and one that verifies drafts in nearly every step."""
    from engine.attention import register as attention
    from engine.attention.settings import AttentionSettings
    from engine.sampling import request_hooks
    from tests.engine.speculation.drafting_engine import drafting_engine
    from tests.engine.stepped_engine import live_engine

    request_hooks.install()
    if request.param == "plain":
        attention.install(AttentionSettings(shared_prefix="off"))
        with live_engine(models["v7"], max_num_seqs=32) as plain:
            yield plain
        return
    folder = tmp_path_factory.mktemp("drafts")
    with drafting_engine(models["v7"], folder, max_num_batched_tokens=48) as (drafting, _):
        yield drafting
