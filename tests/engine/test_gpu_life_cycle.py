"""A GPU engine works through its whole life with every hook of ours, without a GPU.

One process per source of drafts starts it as the product does, and vLLM's own code calls each
stage. What is replaced is described in `gpu_on_cpu`.
"""

from typing import Any

import pytest

from kernels.draft_index.compiled_store import is_built
from tests.engine.gpu_life_cycle import GROUP, Report, live
from tests.engine.greedy import logit_gap_to_greedy
from tests.engine.seedling import reference, teacher_forced

TIE = 0.05
"""Of float16 against float32, in logits."""
ATTENTION, GRAPHS = "shared_prefix_attention", "cuda_graph_plan"
PHASES = ("served", "reloaded", "woken")
needs_store = pytest.mark.skipif(not is_built(), reason="the draft store was not built")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(
    scope="module", params=["off", pytest.param("siblings", marks=needs_store), "drafter"]
)
def life(request: pytest.FixtureRequest) -> Report:
    report = live(request.param)
    assert not report.error, report.error
    return report


def test_vllm_called_every_stage(life: Report) -> None:
    """Profiling configures and captures once before the real cache, and warm-up samples."""
    stages = [call for call in life.calls if call != "sample_tokens"]
    assert stages == [
        *("load_model", "profile_run", "initialize_kv_cache", "capture_model"),
        *("initialize_kv_cache", "compile_or_warm_up_model", "capture_model"),
        *("sleep", "wake_up", "shutdown"),
    ]
    warm_up = life.calls.index("compile_or_warm_up_model")
    captured = life.calls.index("capture_model", warm_up)
    assert life.calls[warm_up + 1 : captured].count("sample_tokens") >= 3


def test_tokens_are_those_of_the_model_in_every_phase(life: Report) -> None:
    model = reference()
    for phase in PHASES:
        for prompt, tokens in life.texts[phase]:
            assert float(logit_gap_to_greedy(model, prompt, tokens).max()) <= TIE, phase


def test_logprobs_are_those_of_the_model_in_every_phase(life: Report) -> None:
    assert life.facts["computes_logprobs"] == "kernels.token_logprobs"
    model = reference()
    for phase in PHASES:
        for (prompt, tokens), logprobs in zip(life.texts[phase], life.logprobs[phase], strict=True):
            assert logprobs == pytest.approx(teacher_forced(model, prompt, tokens), abs=TIE), phase


def test_group_shares_its_prefix_in_every_phase(life: Report) -> None:
    counted = [ranks(life, phase, ATTENTION)[0] for phase in ("start", *PHASES)]
    for before, after in zip(counted, counted[1:], strict=False):
        num_steps = after["steps_grouped"] - before["steps_grouped"]
        assert num_steps > 0
        assert after["rows_grouped"] - before["rows_grouped"] == GROUP * num_steps


def test_drafts_are_accepted_in_every_phase(life: Report, request: pytest.FixtureRequest) -> None:
    mode = request.node.callspec.params["life"]
    accepted = [num_accepted(life.counted[phase]) for phase in PHASES]
    if mode == "off":
        assert accepted == [0, 0, 0]
    else:
        assert 0 < accepted[0] < accepted[1] < accepted[2]


def num_accepted(counted: Any) -> int:
    speculation = counted["features"]["speculation"]
    drafts = speculation["core"] or speculation["ranks"][0]
    return sum(drafts["accepted"].values())


def ranks(life: Report, phase: str, feature: str) -> list[Any]:
    """Counters of a feature in all ranks."""
    found: list[Any] = life.counted[phase]["features"][feature]["ranks"]
    return found


def test_planned_graphs_are_captured_and_used(life: Report) -> None:
    start, woken = (ranks(life, phase, GRAPHS)[0] for phase in ("start", "woken"))
    assert start["num_graphs"] > 0
    assert woken["hits"] > start["hits"] and woken["misses"] == start["misses"]


def test_no_feature_is_off_and_nothing_belongs_to_the_profiling_cache(life: Report) -> None:
    assert life.failed_features == {}
    assert life.facts["state"] == "on"
    assert not any(life.facts["stale"].values()), life.facts["stale"]


def test_mode_auto_measures_its_costs(life: Report, request: pytest.FixtureRequest) -> None:
    assert life.facts["is_calibrated"] == (request.node.callspec.params["life"] == "off")


def test_engine_sleeps_and_wakes(life: Report) -> None:
    assert life.facts["sleep"] == {"slept": None, "missing_bytes": 0, "woken": None}


def test_calls_after_the_shutdown_return(life: Report) -> None:
    assert life.facts["closed"]["state"] != "failed"
    assert life.facts["closed"]["flushed"] is False


def test_warm_up_and_dummy_steps_share_no_counted_prefix(life: Report) -> None:
    counted = ranks(life, "start", ATTENTION)[0]
    assert counted["steps_grouped"] == 0 and counted["steps_skipped"] == {}
    assert ranks(life, "dummy", ATTENTION) == ranks(life, "served", ATTENTION)


def test_warm_up_and_dummy_steps_use_no_counted_graphs(life: Report) -> None:
    counted = ranks(life, "start", GRAPHS)[0]
    assert (counted["hits"], counted["mixed"], counted["misses"]) == (0, 0, [])
    assert ranks(life, "dummy", GRAPHS) == ranks(life, "served", GRAPHS)
