"""Weights that a trainer hands over in memory: opened by vLLM's engine, on all ranks or none."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import CheckpointRefused
from engine.types.samples import VersionSpan
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.ipc_tensors import IpcHandle, IpcTensor, check_tensors
from tests.engine.random_models import make_models
from tests.engine.seedling import teacher_forced
from tests.engine.stepped_engine import Answer, LiveEngine, assert_same, live_engine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SHORT, LONG = list(range(5, 8)), list(range(10, 110))
PROMPTS = (SHORT, LONG)
NORM = "model.norm.weight"
KEPT = {"ok": False, "restored": True, "has_reloaded": False}


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.exhaustive)],
    ids=["tied", "untied"],
)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=request.param)


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> list[Answer]:
    """Answers of an engine that started from v8, before another engine runs."""
    with live_engine(models["v8"]) as engine:
        return engine.ask(*PROMPTS, max_tokens=40)


@pytest.fixture(scope="module")
def shared_engine(models: dict[str, Path], expected: list[Answer]) -> Iterator[LiveEngine]:
    from vllm.config import WeightTransferConfig

    from tests.engine.transfer_worker import TRANSFER

    config = WeightTransferConfig(backend="ipc")
    with live_engine(models["v7"], extension=TRANSFER, weight_transfer_config=config) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: LiveEngine, models: dict[str, Path]) -> LiveEngine:
    shared_engine.swap(models["v7"])
    return shared_engine


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    from tests.engine import transfer_worker

    return transfer_worker.tensors_of(model)


def shared(tensors: dict[str, torch.Tensor]) -> AbstractContextManager[list[IpcTensor]]:
    from tests.engine import transfer_worker

    return transfer_worker.shared(tensors)


def transfer(engine: LiveEngine, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Result of a load of these tensors, which are gone afterwards."""
    with shared(tensors) as handed_over:
        return load(engine, handed_over)


def opened(engine: LiveEngine, tensors: list[IpcTensor]) -> str | None:
    """Reason why the tensors are not open, or None."""
    reason: str | None
    [reason] = engine.rpc("coppice_open_transfer", [tensor.to_dict() for tensor in tensors])
    return reason


def load(engine: LiveEngine, tensors: list[IpcTensor]) -> dict[str, Any]:
    check_tensors(read_base_checkpoint(engine.serving), tensors)
    assert opened(engine, tensors) is None
    with engine.paused():
        [answer] = engine.rpc("coppice_load_transfer", str(engine.serving))
        if answer["ok"]:
            engine.core.coppice_reset_prefix_cache(False)
            engine.core.set_weight_version("transferred")
    found: dict[str, Any] = answer
    return found


def test_transferred_weights_give_the_answers_of_an_engine_started_from_their_files(
    engine: LiveEngine, models: dict[str, Path], expected: list[Answer]
) -> None:
    tensors = tensors_of(models["v8"])
    engine.ask(*PROMPTS, max_tokens=40)  # fills the prefix cache with the previous weights
    answer = transfer(engine, tensors)
    assert answer["ok"] and answer["num_bytes"] == sum(t.nbytes for t in tensors.values())
    answers = engine.ask(*PROMPTS, max_tokens=40)
    assert_same(answers, expected)
    for one in answers:
        assert one.versions == [VersionSpan(version="transferred", start=0, end=40)]


def test_logprobs_are_those_of_teacher_forcing_on_the_transferred_weights(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    assert transfer(engine, tensors_of(models["v8"]))["ok"]
    model = AutoModelForCausalLM.from_pretrained(models["v8"], dtype=torch.float32).eval()
    answers = engine.ask(*PROMPTS, max_tokens=40, temperature=1.0, seed=3)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        forced = teacher_forced(model, prompt, answer.token_ids)
        assert answer.logprobs == pytest.approx(forced, abs=1e-4)


def test_running_sample_continues_under_the_transferred_weights(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    straddler = engine.submit(SHORT, max_tokens=40)
    engine.step(10)
    assert transfer(engine, tensors_of(models["v8"]))["ok"]
    [answer] = engine.finish(straddler)
    assert answer.versions == [
        VersionSpan(version="v7", start=0, end=10),
        VersionSpan(version="transferred", start=10, end=40),
    ]


def test_tensors_in_bfloat16_are_loaded_as_files_in_bfloat16_are(
    engine: LiveEngine, models: dict[str, Path], tmp_path: Path
) -> None:
    from tests.engine.random_models import in_bfloat16

    files = in_bfloat16(models["v8"], tmp_path / "v9")
    halves = tensors_of(files)
    assert {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}
    assert transfer(engine, halves)["ok"]
    transferred = engine.ask(*PROMPTS, max_tokens=40)
    engine.swap(files)
    loaded = engine.ask(*PROMPTS, max_tokens=40)
    assert [a.logprobs for a in transferred] == [a.logprobs for a in loaded]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_value_that_is_not_finite_changes_nothing(
    engine: LiveEngine, models: dict[str, Path], value: float
) -> None:
    before = engine.ask(*PROMPTS, max_tokens=20)
    tensors = tensors_of(models["v8"])
    tensors[NORM][3] = value
    reason = f"CheckpointRefused: {NORM} contains NaN or infinity"
    with shared(tensors) as handed_over:
        assert opened(engine, handed_over) == reason
    assert_same(engine.ask(*PROMPTS, max_tokens=20), before)


def test_tensor_that_cannot_be_opened_changes_nothing(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    before = engine.ask(*PROMPTS, max_tokens=20)
    with shared(tensors_of(models["v8"])) as tensors:
        pass  # the publisher has exited
    assert "FileNotFoundError" in (opened(engine, tensors) or "")
    [answer] = engine.rpc("coppice_load_transfer", str(engine.serving))
    assert answer == KEPT | {"error": "AssertionError: no tensors are open"}
    assert_same(engine.ask(*PROMPTS, max_tokens=20), before)


def test_nothing_is_received_without_files_to_restore(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    before = engine.ask(*PROMPTS, max_tokens=20)
    with shared(tensors_of(models["v8"])) as tensors:
        absent = str(models["v7"] / "absent")
        assert opened(engine, tensors) is None
        [answer] = engine.rpc("coppice_load_transfer", absent)
    assert answer == KEPT | {"error": "CheckpointRefused: the checkpoint does not exist"}
    assert_same(engine.ask(*PROMPTS, max_tokens=20), before)


@pytest.mark.parametrize("num_tensors", [0, 1, 9, 20])
def test_interrupted_load_restores_the_files(
    engine: LiveEngine, models: dict[str, Path], num_tensors: int
) -> None:
    before = engine.ask(*PROMPTS, max_tokens=20)
    engine.rpc("coppice_fail_next", num_tensors)
    answer = transfer(engine, tensors_of(models["v8"]))
    assert answer == {
        "ok": False,
        "error": "OSError: the disk is gone",
        "restored": True,
        "has_reloaded": True,
    }
    assert_same(engine.ask(*PROMPTS, max_tokens=20), before)


def test_overflow_in_the_dtype_of_the_engine_is_refused() -> None:
    from engine.weights.worker_transfer import check_values

    tensors = {"fits": torch.tensor([65504.0]), "empty": torch.empty(0), "w": torch.tensor([-7e4])}
    check_values(tensors, torch.bfloat16)
    with pytest.raises(CheckpointRefused, match="w has values that overflow in float16"):
        check_values(tensors, torch.float16)


def changed(model: Path, **fields: Any) -> list[IpcTensor]:
    """Tensors of a model, of which one is changed."""
    with shared(tensors_of(model)) as tensors:
        return [replace(one, **fields) if one.name == NORM else one for one in tensors]


def test_tensors_that_do_not_fit_the_model_are_refused_by_their_fields(
    models: dict[str, Path],
) -> None:
    served = read_base_checkpoint(models["v7"])
    tensors = changed(models["v8"])
    check_tensors(served, tensors)
    [norm] = [tensor for tensor in tensors if tensor.name == NORM]
    handle = norm.handles["cpu-0"]
    unaligned = dict.fromkeys(norm.handles, replace(handle, offset=2))
    for wrong, reason in (
        ([one for one in tensors if one.name != NORM], f"missing: {NORM}"),
        ([*tensors, replace(norm, name="other")], "unknown: other"),
        ([*tensors, norm], f"{NORM} is listed twice"),
        (changed(models["v8"], shape=(64, 2)), r"shape: model\.norm\.weight \(64, 2\)"),
        (changed(models["v8"], dtype="F64"), "dtype: .* must be BF16, F16 or F32"),
        (changed(models["v8"], handles={"cpu-0": handle}), "is not on the same GPUs"),
        (changed(models["v8"], handles=unaligned), "is not aligned: its offset is 2"),
    ):
        with pytest.raises(CheckpointRefused, match=reason):
            check_tensors(served, wrong)


def test_vllm_opens_a_tensor_on_the_rank_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own engine, with CUDA replaced: index 6 of the arguments is the rank's device."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import ipc_engine

    from engine.weights import worker_transfer

    opened: list[tuple[Any, ...]] = []

    def rebuild(*arguments: Any) -> torch.Tensor:
        opened.append(arguments)
        return torch.ones(arguments[1], dtype=arguments[5])

    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}")
    )
    config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    transfer_engine = ipc_engine.IPCWeightTransferEngine(
        WeightTransferConfig(backend="ipc"), config, torch.device("cuda", 3), torch.nn.Module()
    )
    worker = SimpleNamespace(
        weight_transfer_engine=transfer_engine,
        init_weight_transfer_engine=lambda info: transfer_engine.init_transfer_engine(
            transfer_engine.parse_init_info(info)
        ),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, hf_text_config=SimpleNamespace(tie_word_embeddings=True)
        ),
    )
    handles = {
        f"gpu-{i}": IpcHandle(
            handle=bytes([i]), offset=64 * i, ref_counter="/torch_1_2_3", ref_counter_offset=i
        )
        for i in (2, 3)
    }
    tensors = [
        IpcTensor(name=name, dtype="BF16", shape=(4, 2), handles=handles)
        for name in ("w", "lm_head.weight", "b")
    ]
    received = worker_transfer.receive(worker, tensors)
    assert list(received) == ["b", "w"], "without the tied head"
    assert opened[0] == (
        *(torch.Tensor, torch.Size((4, 2)), (2, 1), 0, torch.storage.TypedStorage, torch.bfloat16),
        *(3, b"\3", 16, 192, False, b"/torch_1_2_3", 3, b"", False),
    )
    with pytest.raises(ValueError, match="IPC handle not found for GPU UUID gpu-3"):
        worker_transfer.receive(worker, [replace(tensors[0], handles={"gpu-2": handles["gpu-2"]})])
    assert transfer_engine.model is transfer_engine._default_model, "the target is reset"


def test_engine_on_a_cpu_cannot_receive_weights() -> None:
    from engine.weights.worker_transfer import obstacle

    cpu = SimpleNamespace(device=torch.device("cpu"), weight_transfer_engine=object())
    assert obstacle(cpu) == "CUDA IPC needs a GPU, and the engine runs on a CPU"
    gpu = SimpleNamespace(device=torch.device("cuda", 0), weight_transfer_engine=None)
    assert obstacle(gpu) == "vLLM has no weight transfer engine"
    assert obstacle(SimpleNamespace(device=gpu.device, weight_transfer_engine=object())) is None
