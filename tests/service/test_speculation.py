"""Speculation options of requests, sibling samples, and speculation metrics."""

import re
from pathlib import Path
from typing import Any

import pytest

from engine.types.feature_stats import SpeculationStats
from tests.fake_engine import FakeEngine
from tests.serving import serving

GROUPS = [{"prompt": {"token_ids": [1, 2]}, "n": 3}, {"prompt": {"token_ids": [1, 2]}, "n": 2}]
TREE = {"mode": "interval", "interval": 4, "max_depth": 1, "max_leaves": 4}


@pytest.mark.parametrize("shape", [{}, {"branching": TREE}], ids=["samples", "tree"])
@pytest.mark.parametrize("said", [{}, {"speculation": False}], ids=["default", "opted out"])
async def test_speculation_option_reaches_the_engine(
    tmp_path: Path, said: dict[str, bool], shape: dict[str, Any]
) -> None:
    engine = FakeEngine()
    asked = {"groups": GROUPS, "sampling": {"max_tokens": 40}} | said | shape
    if shape:
        asked["groups"] = [{"prompt": {"token_ids": [1, 2]}}]
    async with serving(engine, tmp_path) as served:
        answer = await served.http.post("/v1/rollouts", json=asked)
    assert answer.status_code == 200
    assert engine.submitted
    assert {sample.speculation for sample in engine.submitted} == {not said}


async def test_only_samples_of_a_group_are_siblings(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        for _ in range(2):
            asked = {"groups": GROUPS, "sampling": {"max_tokens": 4}}
            await served.http.post("/v1/rollouts", json=asked)
    names = [sample.group for sample in engine.submitted]
    assert [names.count(name) for name in dict.fromkeys(names)] == [3, 2, 3, 2]
    assert None not in names


async def test_metrics_include_engine_counters_and_estimated_gain(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        for number in (3, 5):
            engine.speculated = SpeculationStats(
                drafted={"siblings": 10 * number},
                accepted={"siblings": 2 * number},
                drafts={4: number},
                steps={"drafted": number, "baseline": 1},
                skipped={"seeded": 1},
                version_drafted=100,
                version_accepted=25,
                gain_ratio=1.25,
                cost_error_ratio=0.5,
                store_bytes=77,
            )
            metrics = (await served.http.get("/metrics")).text
    wanted = {
        'drafted_tokens_total{source="siblings"}': 50,
        'drafted_tokens_total{source="all"}': 0,
        'accepted_tokens_total{source="siblings"}': 10,
        'drafts_total{length="4"}': 5,
        'drafts_total{length="15"}': 0,
        'steps_total{decision="drafted"}': 5,
        'steps_total{decision="baseline"}': 1,
        'skipped_total{reason="seeded"}': 1,
        "acceptance_ratio": 0.25,
        "gain_ratio": 1.25,
        "cost_error_ratio": 0.5,
        "store_bytes": 77,
    }
    for name, value in wanted.items():
        [found] = re.findall(
            rf"^coppice_speculation_{re.escape(name)} (\S+)$", metrics, re.MULTILINE
        )
        assert float(found) == value
