"""A live engine with sibling drafts, and a controller that verifies every draft."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.attention import register as attention
from engine.attention.settings import AttentionSettings
from engine.runtime.process_environment import CACHE_ENV
from engine.speculation import settings as process_settings
from engine.speculation.controller import Controller, Draft
from engine.speculation.cpu_speculator import Speculator, TokenLists
from engine.speculation.custom_class_proposer import Proposer
from engine.speculation.request_table import GROUP_ARG, NO_DRAFTS_ARG
from engine.speculation.settings import SpeculationSettings
from kernels.draft_index.compiled_store import is_built
from kernels.draft_index.store_protocol import Int32Array
from tests.engine.speculation.distributions import VOCAB
from tests.engine.stepped_engine import LiveEngine, live_engine

LONGEST = 4


class SendAllDrafts(Controller):
    """Verifies every draft completely, whatever its cost."""

    def should_draft(self, running: int) -> bool:
        return True

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        self.decision = "drafted" if drafted.lengths.any() else "nothing_drafted"
        return drafted.lengths.astype(np.int32)


class SendUniformDrafts(SendAllDrafts):
    """Verifies as many tokens of each row as the longest draft has."""

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        chosen = super().lengths(drafted, running=running, context=context)
        return np.full_like(chosen, chosen.max())


@contextmanager
def drafting_engine(
    model: Path, folder: Path, *, controller: Controller | None = None, **settings: Any
) -> Iterator[tuple[LiveEngine, Proposer]]:
    """A live engine without a cost profile: no test here depends on step costs."""
    if not is_built():
        pytest.skip("the draft store was not built: no C++ compiler when it was installed")
    chosen = SpeculationSettings(mode="siblings", longest_draft=LONGEST)
    os.environ[CACHE_ENV] = str(folder)
    process_settings.install(chosen)
    attention.install(AttentionSettings(shared_prefix="off"))
    sequences = settings.setdefault("max_num_seqs", 32)
    config = {
        "method": "custom_class",
        "model": "engine.speculation.custom_class_proposer.Proposer",
        "num_speculative_tokens": LONGEST,
        "num_speculative_tokens_per_batch_size": [(1, sequences, LONGEST)],
    }
    with live_engine(model, speculative_config=config, **settings) as engine:
        proposer = engine.core.model_executor.driver_worker.worker.model_runner.drafter
        assert isinstance(proposer, Proposer)
        engine.rpc("coppice_start_speculation")
        proposer.end_profile()
        speculator = proposer.speculator
        assert speculator is not None
        speculator.controller = controller or SendAllDrafts()
        yield engine, proposer


def in_group(name: str, *, drafts: bool = True) -> dict[str, Any]:
    """Sampling arguments of a sample of that group."""
    return {"extra_args": {GROUP_ARG: name} | ({} if drafts else {NO_DRAFTS_ARG: True})}


class Recording(Speculator):
    """Outcomes of every drafted token that was reached: [token before, token drafted]."""

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        self.tried, self.hits = np.zeros((2, VOCAB, VOCAB), np.int64)
        self._drafts: dict[str, tuple[int, list[int]]] = {}

    def drafts(
        self, sampled: Sequence[Sequence[int]], lengths: Int32Array, token_ids: Int32Array
    ) -> TokenLists:
        ids = self.speculator.runner.input_batch.req_ids[: len(sampled)]
        for request_id, new in zip(ids, sampled, strict=True):
            last, draft = self._drafts.get(request_id, (0, []))
            for before, token, drafted in zip([last, *new], new, draft, strict=False):
                self.tried[before, drafted] += 1
                self.hits[before, drafted] += token == drafted
        sent = self.speculator.drafts(sampled, lengths, token_ids)
        self._drafts = {
            request_id: (new[-1], draft)
            for request_id, new, draft in zip(ids, sampled, sent, strict=True)
            if draft
        }
        return sent

    def end(self, ended: Iterable[str]) -> None:
        self.speculator.end(ended)
