"""Two ranks with two groups each have the gradient of one process with all four.

The processes are started once for all cases, since a start takes longer than the computation.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from coppice.train import (
    TrainingGroup,
    compute_prompt_kv,
    group_logprobs,
    grouped_backward,
    reduce_gradients,
)
from coppice.train.losses import Totals
from tests.train.models import Gradients, error, gradients, random_group, random_loss, tiny_model
from tests.train.naive import naive_backward, naive_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

WORLD = 2
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, checkpointed": {"reentrant": False},
    "ddp, reentrant": {"reentrant": True},
    "ddp, given": {"given": True},
    "fsdp": {},
    "fsdp, tied": {"tied": True},
    "fsdp, checkpointed": {"reentrant": False},
    "fsdp, reentrant": {"reentrant": True},
    "fsdp, packed": {"schedule": "packed"},
    "fsdp, given": {"given": True},
}


def groups_of_all() -> list[TrainingGroup]:
    """Groups with different numbers of passes, so that the ranks are out of step."""
    return [
        random_group(),
        random_group((3, 9, 70, 2), prompt_tokens=20, seed=5),
        random_group((8, 8, 1), prompt_tokens=33, seed=6),
        random_group((5,) * 6, prompt_tokens=12, seed=7),
    ]


def wrapped(model: Any, name: str) -> nn.Module:
    if name.startswith("ddp"):
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    sharded: nn.Module = fully_shard(model)
    return sharded


def whole_gradients(model: nn.Module) -> Gradients:
    return {
        name.removeprefix("module."): grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in gradients(model).items()
    }


def run_case(name: str, mine: list[TrainingGroup]) -> dict[str, Any]:
    options = dict(CASES[name])
    model = tiny_model(tied=options.pop("tied", False))
    if (reentrant := options.pop("reentrant", None)) is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    given = options.pop("given", False)
    model = wrapped(model, name)
    logprobs = [group_logprobs(model, group, pass_tokens=50).logprobs for group in mine]
    steps = []
    for _ in range(2):
        for group in mine:
            prompt_kv = compute_prompt_kv(model, group) if given else None
            loss = random_loss(group)
            grouped_backward(model, group, loss, pass_tokens=50, prompt_kv=prompt_kv, **options)
        reduce_gradients(model)
        steps.append(whole_gradients(model))
    return {"logprobs": logprobs, "steps": steps}


def run_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=WORLD
    )
    mine = groups_of_all()[2 * rank : 2 * rank + 2]
    found: dict[str, Any] = {name: run_case(name, mine) for name in CASES}
    found["totals"] = Totals.of(mine).over_ranks()
    torch.save(found, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank."""
    directory: Path = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (str(directory),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradient_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    model = tiny_model(tied=CASES[name].get("tied", False))
    for group in groups_of_all():
        naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    for rank in ranks:
        for found in rank[name]["steps"]:
            assert error(found, exact) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_each_rank_has_the_logprobs_of_its_groups(name: str, ranks: list[dict[str, Any]]) -> None:
    model = tiny_model(tied=CASES[name].get("tied", False))
    found = [logprobs for rank in ranks for logprobs in rank[name]["logprobs"]]
    for logprobs, group in zip(found, groups_of_all(), strict=True):
        exact = naive_logprobs(model, group).logprobs
        assert torch.allclose(logprobs, exact, rtol=0, atol=2e-5)


def test_totals_are_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["totals"] for rank in ranks] == [Totals.of(groups_of_all())] * WORLD


def test_single_process_has_nothing_to_reduce() -> None:
    model = tiny_model()
    naive_backward(model, random_group(), random_loss(random_group()))
    reduce_gradients(model)
    assert gradients(model)
