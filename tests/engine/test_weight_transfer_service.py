"""Weights handed over in memory to a real engine behind HTTP."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.wire.cuda_ipc_weights import IpcHandle, IpcTensor, TransferDtype, TransferRequest
from engine.errors import StartFailed
from engine.vllm_engine import VllmEngine
from engine.weights import ipc_tensors
from tests.engine.seedling import MODEL, settings, teacher_forced
from tests.serving import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

IPC: dict[str, Any] = {"engine": {"weight_transfer": "ipc"}}
PROMPT = [5, 7, 11, 13, 17, 19]


def stepped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights after a training step: every value changes slightly."""
    draw = torch.Generator().manual_seed(3)
    return {
        name: (t + 0.02 * torch.randn(t.shape, generator=draw)).to(t.dtype)
        for name, t in tensors.items()
    }


def reference(tensors: Mapping[str, torch.Tensor]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.load_state_dict(dict(tensors), strict=False)
    model.tie_weights()
    return model


def request_of(tensors: Sequence[ipc_tensors.IpcTensor]) -> str:
    listed = [
        IpcTensor(
            name=tensor.name,
            dtype=cast(TransferDtype, tensor.dtype),
            shape=list(tensor.shape),
            handles={gpu: wire_handle(handle) for gpu, handle in tensor.handles.items()},
        )
        for tensor in tensors
    ]
    return TransferRequest(tensors=listed).model_dump_json()


def wire_handle(handle: ipc_tensors.IpcHandle) -> IpcHandle:
    return IpcHandle(
        handle=base64.b64encode(handle.handle).decode(),
        offset=handle.offset,
        ref_counter=handle.ref_counter,
        ref_counter_offset=handle.ref_counter_offset,
    )


async def transfer(served: Served, version: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    from tests.engine.transfer_worker import shared

    with shared(tensors) as handed_over:
        return await served.http.post(
            f"/v1/weights/{version}/transfer",
            content=request_of(handed_over),
            headers={"content-type": "application/json"},
        )


async def sample(served: Served) -> Any:
    content = {
        "groups": [{"prompt": {"token_ids": PROMPT}, "seed": 3}],
        "sampling": {"max_tokens": 24, "ignore_eos": True},
    }
    answer = await served.http.post("/v1/rollouts", json=content)
    assert answer.status_code == 200, answer.text
    return answer.json()["groups"][0]["samples"][0]


async def assert_sampled_from(served: Served, version: str, model: Any) -> None:
    sampled = await sample(served)
    assert sampled["versions"] == [{"version": version, "start": 0, "end": 24}]
    forced = teacher_forced(model, PROMPT, sampled["token_ids"])
    assert sampled["logprobs"] == pytest.approx(forced, abs=1e-4)


async def test_versions_handed_over_in_memory_are_sampled_and_survive_failures(
    tmp_path: Path,
) -> None:
    """A failure before the load keeps them; one in the middle restores the last files."""
    from tests.engine.transfer_worker import TRANSFER, tensors_of

    first = stepped(tensors_of(MODEL))
    second = stepped(first)
    unusable = first | {"model.norm.weight": torch.full_like(first["model.norm.weight"], torch.nan)}
    engine = VllmEngine(settings(weight_transfer="ipc"), worker_extension=TRANSFER)
    async with serving(engine, tmp_path, **IPC) as served:
        initial = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        await assert_sampled_from(served, "v0", initial)
        for version, tensors in (("v1", first), ("v2", second)):
            answer = await transfer(served, version, tensors)
            assert answer.status_code == 200, answer.text
            await assert_sampled_from(served, version, reference(tensors))

        refused = await transfer(served, "v3", unusable)
        assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")
        assert refused.json()["detail"] == "model.norm.weight contains NaN or infinity"
        await assert_sampled_from(served, "v2", reference(second))

        lacking = {name: t for name, t in first.items() if name != "model.norm.weight"}
        missing = await transfer(served, "v3", lacking)
        assert (missing.status_code, missing.json()["code"]) == (422, "weights_refused")

        await engine._processes.call_workers("coppice_fail_next", 9)
        failed = await transfer(served, "v3", first)
        assert failed.json()["code"] == "activation_failed"
        assert "v0, the last version with files, is served" in failed.json()["detail"]
        assert (await served.http.get("/v1/weights")).json()["active"] == "v0"
        await assert_sampled_from(served, "v0", initial)
        assert (await transfer(served, "v3", first)).status_code == 200
        await assert_sampled_from(served, "v3", reference(first))

        assert (await served.http.post("/v1/sleep", json={"level": 2})).status_code == 200
        await served.http.post("/v1/wake", json={"tags": ["weights"]})
        assert (await transfer(served, "v4", second)).status_code == 200
        assert (await served.http.post("/v1/wake", json={})).json()["paused"] is False
        await assert_sampled_from(served, "v4", reference(second))
        assert (await served.http.post("/v1/sleep", json={"level": 2})).status_code == 200
        assert (await served.http.post("/v1/wake", json={})).json()["paused"] is False
        await assert_sampled_from(served, "v0", initial)


async def test_engine_on_a_cpu_does_not_start_with_the_setting() -> None:
    engine = VllmEngine(settings(weight_transfer="ipc"))
    try:
        with pytest.raises(StartFailed, match=r"weight_transfer is ipc: CUDA IPC needs a GPU"):
            await engine.start("v0")
    finally:
        await engine.stop()
