"""Agreement of the ranks of an engine on shared prefixes, after the warm-up."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention import register
from engine.attention.counters import COUNTERS
from engine.attention.crossover import Crossover
from engine.attention.register import FEATURE
from engine.attention.settings import AttentionSettings
from engine.runtime import warm_up
from engine.runtime.feature_guard import Failure
from tests.engine.attention.second_runner import Runner, without_gpu

# Importing vLLM without a GPU emits unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

ALWAYS = Crossover(stock=(1.0, 0.0, 0.0), shared=(0.0,) * 6)
SHARED = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [5, 6, 7]}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """A runner in mode `auto`, with a geometry and two requests of three that share a prefix."""
    from vllm.v1.attention.backends import fa_utils

    from engine.attention import cuda_calibration

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(cuda_calibration, "compile_kernels", lambda _: None)
    monkeypatch.setattr(cuda_calibration, "crossover_of", lambda _: ALWAYS)
    monkeypatch.setattr(register, "_settings", AttentionSettings(shared_prefix="auto"))
    with without_gpu(monkeypatch):
        made = Runner()
        give_geometry(made.builder)
        for name, blocks in SHARED.items():
            made.add(name, blocks, computed=90)
        yield made


def give_geometry(builder: Any, num_heads_kv: int = 2) -> None:
    builder.grouper.mode = "auto"
    builder.num_heads_q, builder.num_heads_kv, builder.headdim = 4, num_heads_kv, 64
    builder.model_config = SimpleNamespace(dtype=torch.bfloat16)


class Ranks:
    """The ranks of an engine, as seen by one of them: the others send `sent`."""

    cpu_group = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1) -> None:
        from engine.attention import cuda_rank_setup

        self.rank_in_group, self.world_size = rank, size
        self.sent: Any = ALWAYS
        self.other_layers: Any = None
        self.gathered: list[Any] = []
        monkeypatch.setattr(cuda_rank_setup, "get_world_group", lambda: self)
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.all_gather)

    def all_gather(self, found: list[Any], mine: Any, group: Any) -> None:
        self.gathered.append(mine)
        found[:] = [mine, mine if self.other_layers is None else self.other_layers]

    def broadcast_object(self, value: Any, src: int) -> Any:
        assert src == 0
        if self.rank_in_group == 0:
            self.sent = value
        else:
            assert value is None
        return self.sent


def prepare(runner: Any) -> None:
    from engine.attention import cuda_rank_setup

    cuda_rank_setup.prepare(runner)


def shares(runner: Runner) -> bool:
    return runner.gather(dict.fromkeys("abc", 1)) is None


def test_auto_shares_only_after_the_measurement(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ranks(monkeypatch)
    assert not shares(runner)
    prepare(runner)
    assert shares(runner)


def test_ranks_use_the_costs_of_the_first(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.attention import cuda_calibration

    first, second = Ranks(monkeypatch, size=2), Ranks(monkeypatch, rank=1, size=2)
    monkeypatch.setattr(cuda_calibration, "crossover_of", lambda _: 1 / 0)
    second.sent = {cuda_calibration.geometry_of(runner.builder): ALWAYS}
    prepare(runner)
    assert first.sent is ALWAYS, "not used"
    assert runner.builder.grouper.crossover is ALWAYS


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_ranks_with_different_layers_share_nothing(
    mode: Any, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline stage whose layers have sliding windows would select other graphs."""
    monkeypatch.setattr(register, "_settings", AttentionSettings(shared_prefix=mode))
    ranks = Ranks(monkeypatch, size=2)
    ranks.other_layers = frozenset({(0, "sliding_window")})
    runner.builder.grouper.mode = mode
    prepare(runner)
    assert not shares(runner)
    assert register.state(runner) == "parallelism"


def test_ranks_agree_on_layers_of_draft_models_too(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last pipeline stage has a draft model."""
    from engine.attention import cuda_rank_setup

    alone = cuda_rank_setup._layers(runner)
    runner.speculator = SimpleNamespace(draft_attn_layer_names={"draft"})
    give_geometry(runner.add_group("draft"), num_heads_kv=1)
    assert cuda_rank_setup._layers(runner) == alone


@pytest.mark.parametrize("rank", [0, 1])
def test_failed_measurement_fails_on_all_ranks(
    rank: int, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.attention import cuda_calibration

    monkeypatch.setattr(cuda_calibration, "crossover_of", lambda _: 1 / 0)
    ranks = Ranks(monkeypatch, rank=rank, size=2)
    ranks.sent = Failure("ZeroDivisionError: division by zero")
    with monkeypatch.context() as patch:
        patch.setattr(FEATURE, "state", FEATURE.state)  # restored after it
        prepare(runner)
        assert "division by zero" in (FEATURE.state.reason or "")
        assert register.state(runner) == "failed" and not shares(runner)


def test_rank_that_has_failed_takes_part(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, size=2)
    ranks.other_layers = frozenset({(0, "sinks")})
    with monkeypatch.context() as patch:
        patch.setattr(FEATURE, "state", FEATURE.state)  # restored after it
        FEATURE.disable(ValueError("no kernel"))
        prepare(runner)
    assert ranks.gathered == [None]


def test_warm_up_steps_are_not_counted(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM warms up with real scheduler outputs, before it captures graphs."""
    Ranks(monkeypatch)
    COUNTERS.record_grouped(num_rows=2, bytes_saved=1)
    COUNTERS.record_skipped("nothing_shared")
    register._prepare(SimpleNamespace(model_runner=runner))
    counted = COUNTERS.read()
    assert counted["steps_grouped"] == 0 and counted["steps_skipped"] == {}
    assert runner.builder.grouper.crossover is ALWAYS


def test_installation_on_a_gpu_prepares_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(warm_up, "_callbacks", [])
    monkeypatch.setattr(warm_up, "_install", lambda: None)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    try:
        with without_gpu(monkeypatch):
            register._register.__wrapped__()
    finally:
        AttentionBackendEnum.FLASH_ATTN.clear_override()
    assert warm_up._callbacks == [register._prepare]
