"""Weights that another process hands over in GPU memory by CUDA IPC."""

import base64
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coppice import GpuWeights
from coppice.wire.cuda_ipc_weights import IpcTensor
from tests.engine.random_models import make_models
from tests.gpu.device import ON_GPU
from tests.gpu.live import engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="CUDA IPC needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]

PROMPT = list(range(10, 110))
NUM_TRANSFERS = 3


def trainer(model: Path, connection: Connection) -> None:
    """Hands its weights over at each message, and keeps them until the next one."""
    state = {
        name: tensor.cuda().bfloat16()
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    while connection.recv():
        with GpuWeights(state) as weights:
            connection.send([tensor.model_dump() for tensor in weights.tensors])
            connection.recv()
    allocated = torch.cuda.memory_allocated()
    state.clear()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    connection.send((allocated, torch.cuda.memory_allocated()))


def fields_of(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fields that the service sends to the workers."""
    for tensor in tensors:
        IpcTensor.model_validate(tensor)
        for handle in tensor["handles"].values():
            handle["handle"] = base64.b64decode(handle["handle"])
    return tensors


def test_engine_loads_the_tensors_of_another_process_and_closes_them(tmp_path: Path) -> None:
    from vllm.config import WeightTransferConfig

    models = make_models(tmp_path, tied=True)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=trainer, args=(models["v8"], there), daemon=True)
    process.start()
    config = WeightTransferConfig(backend="ipc")
    with engine(models["v7"], weight_transfer_config=config) as live:
        assert live.rpc("coppice_transfer_obstacle") == [None]
        [before] = live.ask(PROMPT, max_tokens=20)
        for _ in range(NUM_TRANSFERS):
            live.swap(models["v7"])
            here.send(True)
            fields = fields_of(here.recv())
            with live.paused():
                assert live.rpc("coppice_open_transfer", fields) == [None]
                [answer] = live.rpc("coppice_load_transfer", str(models["v7"]))
                assert answer["ok"], answer
                live.core.coppice_reset_prefix_cache(False)
            here.send(None)
            [transferred] = live.ask(PROMPT, max_tokens=20)
        live.swap(models["v8"])
        [loaded] = live.ask(PROMPT, max_tokens=20)
        assert transferred.token_ids == loaded.token_ids != before.token_ids
        assert transferred.logprobs == pytest.approx(loaded.logprobs, abs=1e-6)
        here.send(False)
        allocated, left = here.recv()
        assert allocated > 0 and left == 0, "the engine has closed all tensors"
        process.join()


def test_memory_of_a_refused_transfer_is_released() -> None:
    weights = GpuWeights({"w": torch.ones(2**20, device="cuda")})
    before = torch.cuda.memory_allocated()
    weights.mark_refused()
    weights.close()
    assert torch.cuda.memory_allocated() <= before - 4 * 2**20
