"""LoRA adapters in a real engine: sampled tokens, and isolation of their prefix cache."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapters.feature import lora_arguments
from engine.adapters.loaded_adapters import LoadedAdapters
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.validation import check_adapter
from tests.engine.adapters.peft_adapters import saved, under
from tests.engine.attention.shared_engine import SharedEngine, shared_engine
from tests.engine.random_models import in_bfloat16
from tests.engine.seedling import BLOCK, MODEL, teacher_forced
from tests.engine.speculation.drafting_engine import drafting_engine, in_group
from tests.engine.stepped_engine import Answer, LiveEngine

# Imports of vLLM and PEFT emit unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPT = [5 + i % 60 for i in range(3 * BLOCK + 7)]
NAMES = LoadedAdapters(100)
"""Adapter IDs are never reused within a process."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "all": saved(folder / "all", seed=1),
        "some": saved(folder / "some", seed=2, rank=4, target_modules=["q_proj", "down_proj"]),
        "patterned": saved(
            folder / "patterned",
            seed=3,
            rank_pattern={"q_proj": 16},
            alpha_pattern={"up_proj": 3},
            use_rslora=True,
        ),
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    folder = tmp_path_factory.mktemp("cache")
    with shared_engine(MODEL, folder, **lora_arguments(3, 16)) as shared:
        yield shared


@pytest.fixture
def engine(shared: SharedEngine) -> Iterator[LiveEngine]:
    """A live engine with an empty prefix cache. All adapters are removed after the test."""
    with shared.mode("always"):
        yield shared.live
    for number in list_lora_arguments(shared.live):
        shared.live.rpc("coppice_unload_adapter", number)


def list_lora_arguments(engine: LiveEngine) -> set[int]:
    loaded: set[int] = engine.core.list_loras()
    return loaded


def load(engine: LiveEngine, name: str, path: Path) -> Any:
    return engine.load_adapter_request(NAMES.new_request(name, path))


def assert_drawn_from(model: Any, answers: Sequence[Answer], prompt: list[int] = PROMPT) -> None:
    for answer in answers:
        expected = teacher_forced(model, prompt, answer.token_ids)
        assert answer.logprobs == pytest.approx(expected, abs=1e-3)


def group(engine: LiveEngine, adapter: Any, n: int = 3, num_tokens: int = 12) -> list[str]:
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": num_tokens}
    return [engine.submit(PROMPT, adapter=adapter, **drawn) for _ in range(n)]


def test_concurrent_groups_are_sampled_under_their_own_lora_arguments(
    shared: SharedEngine, made: dict[str, Path]
) -> None:
    """Attention reads each group's prompt once; samples of the base model are among them."""
    engine = shared.live
    paths: list[Path | None] = [None, *made.values()]
    requests: list[Any] = [path and load(engine, "policy", path) for path in paths]
    with shared.mode("always") as counted:
        groups = [group(engine, request) for request in requests]
        answers = [engine.finish(*names) for names in groups]
    assert counted["steps_grouped"] > 0
    for path, drawn in zip(paths, answers, strict=True):
        assert_drawn_from(under(path), drawn)
    for request in requests[1:]:
        engine.rpc("coppice_unload_adapter", request.lora_int_id)


def test_adapter_in_bfloat16_is_served_in_float32(
    engine: LiveEngine, made: dict[str, Path], tmp_path: Path
) -> None:
    adapter = in_bfloat16(made["all"], tmp_path / "bf16", "adapter_model.safetensors")
    check_adapter(read_base_checkpoint(MODEL), adapter, max_rank=16, dtype="float32")
    [answer] = engine.ask(PROMPT, adapter=load(engine, "policy", adapter), max_tokens=12)
    assert_drawn_from(under(adapter), [answer])


def test_replacement_adapter_never_hits_prefixes_of_the_old_one(
    engine: LiveEngine, made: dict[str, Path]
) -> None:
    old = load(engine, "policy", made["all"])
    for cached in (0, 3 * BLOCK):
        [answer] = engine.ask(PROMPT, adapter=old, max_tokens=4)
        assert answer.num_cached_tokens == cached
    new = load(engine, "policy", made["patterned"])
    [answer] = engine.ask(PROMPT, adapter=new, max_tokens=4)
    assert answer.num_cached_tokens == 0
    assert_drawn_from(under(made["patterned"]), [answer])
    [base] = engine.ask(PROMPT, max_tokens=4)
    assert base.num_cached_tokens == 0
    assert_drawn_from(under(None), [base])


def test_vllm_keys_prefixes_by_adapter_name_and_path_only(
    engine: LiveEngine, made: dict[str, Path], tmp_path: Path
) -> None:
    """As after a swap in place: the reason why no adapter name is reused."""
    from vllm.lora.request import LoRARequest

    path = tmp_path / "policy"
    path.symlink_to(made["all"])
    old = engine.load_adapter_request(LoRARequest("policy", 1001, str(path)))
    engine.ask(PROMPT, adapter=old, max_tokens=4)
    path.unlink()
    path.symlink_to(made["patterned"])
    new = engine.load_adapter_request(LoRARequest("policy", 1002, str(path)))
    [answer] = engine.ask(PROMPT, adapter=new, max_tokens=4)
    assert answer.num_cached_tokens == 3 * BLOCK


def test_samples_of_two_adapter_versions_run_concurrently(
    engine: LiveEngine, made: dict[str, Path]
) -> None:
    """As when a trainer swaps the adapter under running samples."""
    old = load(engine, "policy", made["all"])
    began = group(engine, old, num_tokens=24)
    engine.step(8)
    new = load(engine, "policy", made["patterned"])
    later = group(engine, new)
    assert_drawn_from(under(made["all"]), engine.finish(*began))
    assert_drawn_from(under(made["patterned"]), engine.finish(*later))


def test_response_is_scored_under_its_adapter(engine: LiveEngine, made: dict[str, Path]) -> None:
    from vllm import SamplingParams

    request = load(engine, "policy", made["all"])
    whole = {"prompt_token_ids": PROMPT}
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    [output] = engine._llm.generate([whole], params, use_tqdm=False, lora_request=request)
    scored = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[5:]]
    expected = teacher_forced(under(made["all"]), PROMPT[:5], PROMPT[5:])
    assert scored == pytest.approx(expected, abs=1e-3)


def test_adapter_that_fails_to_load_takes_no_slot(engine: LiveEngine, tmp_path: Path) -> None:
    request = NAMES.new_request("policy", saved(tmp_path / "wide", seed=4, rank=32))
    lora_fields = (request.lora_name, request.lora_int_id, request.lora_path)
    [reason] = engine.rpc("coppice_load_adapter", *lora_fields)
    assert "rank 32" in reason
    assert not list_lora_arguments(engine)
    [answer] = engine.ask(PROMPT, max_tokens=4)
    assert_drawn_from(under(None), [answer])


def test_base_weights_change_under_loaded_lora_arguments(
    engine: LiveEngine, made: dict[str, Path], tmp_path: Path
) -> None:
    """A running sample has tokens of both bases.

    KV that it recomputed may be cached; samples of the base model hit none of it.
    """
    other = scaled(tmp_path / "v1")
    request = load(engine, "policy", made["all"])
    [running] = group(engine, request, n=1, num_tokens=24)
    engine.step(12)
    engine.swap(other, recompute=True)
    [answer] = engine.finish(running)
    [before, after] = answer.versions
    old, new = under(made["all"]), under(made["all"], other)
    cut = before.end
    assert_drawn_from(old, [first(answer, cut)])
    rest = Answer(
        token_ids=answer.token_ids[cut:],
        logprobs=answer.logprobs[cut:],
        versions=[after],
        num_cached_tokens=0,
    )
    assert_drawn_from(new, [rest], PROMPT + answer.token_ids[:cut])
    [fresh, base] = (engine.ask(PROMPT, adapter=a, max_tokens=4)[0] for a in (request, None))
    assert (fresh.num_cached_tokens, base.num_cached_tokens) == (3 * BLOCK, 0)
    assert_drawn_from(new, [fresh])
    assert_drawn_from(under(None, other), [base])
    engine.swap(MODEL)


def first(answer: Answer, num_tokens: int) -> Answer:
    return Answer(
        token_ids=answer.token_ids[:num_tokens],
        logprobs=answer.logprobs[:num_tokens],
        versions=answer.versions[:1],
        num_cached_tokens=answer.num_cached_tokens,
    )


def scaled(folder: Path) -> Path:
    """The shipped model after a large training step."""
    folder.mkdir()
    torch.manual_seed(9)
    tensors = {
        name: (values.float() * (1 + 0.1 * torch.randn(values.shape))).to(values.dtype)
        for name, values in load_file(MODEL / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    return folder


def test_drafts_under_an_adapter_are_verified_with_it(
    made: dict[str, Path], tmp_path: Path
) -> None:
    """Sibling drafts, all of them verified, with samples of the base model in the batch."""
    with drafting_engine(MODEL, tmp_path, **lora_arguments(1, 16)) as (engine, _):
        request = load(engine, "policy", made["all"])
        drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
        for path, adapter in ((made["all"], request), (None, None)):
            drawn |= in_group(f"{path}")
            names = [engine.submit(PROMPT, adapter=adapter, **drawn) for _ in range(4)]
            if adapter is None:
                based = names
            else:
                adapted = names
        assert_drawn_from(under(made["all"]), engine.finish(*adapted))
        assert_drawn_from(under(None), engine.finish(*based))
