"""A live engine with a draft model, and a controller that verifies every draft."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine.attention import register as attention
from engine.attention.settings import AttentionSettings
from engine.drafter.acceptance_by_version import Snapshot
from engine.drafter.core.engine_core_methods import counted
from engine.drafter.core.scheduler_hooks import DraftingHooks
from engine.speculation import settings as process_settings
from engine.speculation.controller import Controller
from engine.speculation.counters import Snapshot as SpeculationSnapshot
from engine.speculation.settings import SpeculationSettings
from tests.engine.speculation.distributions import VOCAB
from tests.engine.speculation.drafting_engine import LONGEST, SendAllDrafts
from tests.engine.stepped_engine import LiveEngine, live_engine

FIRST = "d0"


@contextmanager
def drafter_engine(
    model: Path, drafter: Path, *, controller: Controller | None = None, **settings: Any
) -> Iterator[LiveEngine]:
    """A live engine without a cost profile: no test here depends on step costs."""
    attention.install(AttentionSettings(shared_prefix="off"))
    process_settings.install(SpeculationSettings(mode="drafter"))
    sequences = settings.setdefault("max_num_seqs", 32)
    config = {
        "method": "draft_model",
        "model": str(drafter),
        "num_speculative_tokens": LONGEST,
        "num_speculative_tokens_per_batch_size": [(1, sequences, LONGEST)],
    }
    with live_engine(model, speculative_config=config, **settings) as engine:
        drafting = DraftingHooks(
            engine.core.scheduler,
            max_draft_tokens=LONGEST,
            serving=FIRST,
            weights=engine.core.get_weight_version,
            controller=controller or SendAllDrafts(),
        )
        drafting.attach()
        engine.core.coppice_drafting = drafting
        yield engine


def read(engine: LiveEngine) -> Snapshot:
    found = counted(engine.core)
    assert found is not None
    return found


def drafts(engine: LiveEngine) -> SpeculationSnapshot:
    """Counters of the drafts in EngineCore."""
    drafting: DraftingHooks = engine.core.coppice_drafting
    return drafting.speculation()


def num_accepted(engine: LiveEngine) -> int:
    return sum(drafts(engine)["accepted"].values())


class Recording:
    """Outcomes of every drafted token that was reached: [token before, token drafted]."""

    def __init__(self, engine: LiveEngine) -> None:
        self.tried, self.hits = np.zeros((2, VOCAB, VOCAB), np.int64)
        self._scheduler = engine.core.scheduler
        self._update = self._scheduler.update_from_output

    def __enter__(self) -> "Recording":
        self._scheduler.update_from_output = self._updated
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.update_from_output = self._update

    def _updated(self, scheduled: Any, output: Any) -> Any:
        for request_id, draft in scheduled.scheduled_spec_decode_tokens.items():
            new = output.sampled_token_ids[output.req_id_to_index[request_id]]
            last = self._scheduler.requests[request_id].all_token_ids[-1]
            for before_schedule, token, drafted in zip([last, *new], new, draft, strict=False):
                self.tried[before_schedule, drafted] += 1
                self.hits[before_schedule, drafted] += token == drafted
        return self._update(scheduled, output)
