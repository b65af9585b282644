"""Weights updates during preemptions, aborts, prefix hits and drafts, with a full cache."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.random_models import make_models
from tests.engine.stepped_engine import Answer, LiveEngine, live_engine
from tests.engine.upstream_defects import SPECULATION

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SHARED = [(3 * i) % 500 for i in range(230)]
PROMPTS = [SHARED[:20], SHARED[:100], SHARED, SHARED[:200] + [300], list(range(200, 280))]
MAX_TOKENS = 60
NUM_SWAPS = 25


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


def expected_tokens(model: Path) -> list[list[int]]:
    with live_engine(model) as engine:
        return [answer.token_ids for answer in engine.ask(*PROMPTS, max_tokens=MAX_TOKENS)]


def test_every_answer_not_met_by_an_update_matches_its_version(models: dict[str, Path]) -> None:
    expected = {version: expected_tokens(model) for version, model in models.items()}
    with live_engine(models["v7"], num_gpu_blocks_override=40, **SPECULATION) as engine:
        load = Load(engine)
        load.run(list(models.values()))
        answers = load.finish()
        pool = engine.core.coppice_check_pool()
    assert pool["num_free_blocks"] == pool["num_blocks"] == 39
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)
    assert load.num_preempted > 0 and len(answers) > 2 * NUM_SWAPS
    for prompt, answer in answers:
        (span,) = answer.versions
        assert answer.token_ids == expected[span.version][prompt][: span.end]


class Load:
    """Random requests with a fixed seed. `met` are the requests that ran during an update."""

    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self.asked: dict[str, int] = {}
        self.met: set[str] = set()
        self.num_preempted = 0

    def run(self, models: list[Path]) -> None:
        choose = random.Random(5)
        for _ in range(NUM_SWAPS):
            for prompt in choose.choices(range(len(PROMPTS)), k=6):
                num_tokens = choose.choice([5, 30, MAX_TOKENS])
                self.asked[self.engine.submit(PROMPTS[prompt], max_tokens=num_tokens)] = prompt
            self.engine.step(choose.randrange(2, 15))
            if choose.random() < 0.3:
                self.engine.abort(self.asked.popitem()[0])
            self.look(self.engine.core.scheduler)
            self.engine.swap(choose.choice(models))

    def look(self, scheduler: Any) -> None:
        """Records the running requests and preemptions. vLLM appends a suffix to request names."""
        self.met |= {request.request_id.rpartition("-")[0] for request in scheduler.running}
        self.num_preempted += sum(r.num_preemptions for r in scheduler.requests.values())

    def finish(self) -> list[tuple[int, Answer]]:
        answers = self.engine.finish(*self.asked)
        pairs = zip(self.asked.items(), answers, strict=True)
        return [(prompt, answer) for (name, prompt), answer in pairs if name not in self.met]
