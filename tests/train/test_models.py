"""Supported models; models with a wrong gradient are refused before any forward."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from coppice.train import (
    PromptKV,
    TrainingGroup,
    UnsupportedModel,
    compute_prompt_kv,
    group_logprobs,
    grouped_backward,
)
from coppice.train.backward import choose
from coppice.train.backward_memory import (
    ModelInfo,
    cgroup_free_bytes,
    free_bytes,
    get_model_info,
    graph_bytes,
    graph_fits,
)
from examples.seedling.arithmetic import draw, written_out
from tests.train.models import VOCABULARY, error, gradients, random_group, random_loss, tiny_model
from tests.train.naive import naive_backward, naive_logprobs
from tests.train.test_backward import SCHEDULES, without_the_prompts

pytestmark = pytest.mark.slow

SEEDLING = Path(__file__).parents[2] / "examples" / "seedling" / "model"

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OTHERS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_the_padded_gradient(family: str) -> None:
    config_class, model_class = OTHERS[family]
    torch.manual_seed(0)
    model, group = model_class(config_class(**SIZES)).train(), random_group()
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    for schedule in SCHEDULES:
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=100)
        assert error(gradients(model), exact) < 1e-5, schedule


def test_trained_checkpoint_has_the_padded_gradient() -> None:
    """The shipped one, on a problem's correct solution and on those of other problems."""
    model = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(SEEDLING)
    problems = [draw(random.Random(seed), held_out=False) for seed in range(6)]
    group = TrainingGroup(
        prompt=torch.tensor(tokenizer(problems[0].prompt)["input_ids"]),
        responses=tuple(
            torch.tensor(tokenizer(written_out(problem))["input_ids"]) for problem in problems
        ),
    )
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    for schedule in SCHEDULES:
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=100)
        assert error(gradients(model), exact) < 1e-5, schedule
    assert error(without_the_prompts(model, group), exact) > 0.1


def refused(model: Any, why: str) -> None:
    group = random_group()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=why):
        grouped_backward(model, group, random_loss(group))
    with pytest.raises(UnsupportedModel, match=why):
        group_logprobs(model, group)
    assert gradients(model) == {}
    assert model.config._attn_implementation == before


def assert_padded_gradient(model: Any) -> None:
    """Every schedule has the gradient and the logprobs of padded rows.

    The group has a prompt that is longer than the windows, and rows that leave the prompt behind.
    """
    group = random_group(lengths=(17, 1, 70, 40, 90, 40))
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    for schedule in SCHEDULES:
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=100)
        assert error(gradients(model), exact) < 1e-5, schedule
    prompt_kv = compute_prompt_kv(model, group)
    grouped_backward(model, group, random_loss(group), prompt_kv=prompt_kv)
    assert error(gradients(model), exact) < 1e-5
    found = group_logprobs(model, group, prompt_kv).logprobs
    torch.testing.assert_close(found, naive_logprobs(model, group).logprobs.detach())


WINDOWED = {
    "all layers": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=50)),
    "one token": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=1)),
    "the last layers": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    ),
    "alternating": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SIZES,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=50,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "heads of other sizes": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **SIZES,
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=1,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            sliding_window=50,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "sinks": (
        GptOssForCausalLM,
        GptOssConfig(
            **SIZES,
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=50,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}


@pytest.mark.parametrize("windows", WINDOWED)
def test_windows_and_sinks_have_the_padded_gradient(windows: str) -> None:
    model_class, config = WINDOWED[windows]
    torch.manual_seed(0)
    model = model_class(config).train()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    assert_padded_gradient(model)


def only_windows(prompt_kv: PromptKV, num_tokens: Sequence[int | None]) -> PromptKV:
    """Prompt KV of which each layer has only its last tokens, as a server sends it."""
    keys, values = (
        tuple(
            tensor if number is None else tensor[:, -number:]
            for tensor, number in zip(tensors, num_tokens, strict=True)
        )
        for tensors in (prompt_kv.keys, prompt_kv.values)
    )
    return PromptKV(keys=keys, values=values)


@pytest.mark.parametrize("schedule", ["recomputed", "injected"])
@pytest.mark.parametrize("num_tokens", [49, 52])
def test_prompt_kv_of_windows_needs_only_their_tokens(num_tokens: int, schedule: Any) -> None:
    model_class, config = WINDOWED["alternating"]
    torch.manual_seed(0)
    model, group = model_class(config).train(), random_group()
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    prompt_kv = only_windows(compute_prompt_kv(model, group), (num_tokens, None, num_tokens))
    report = grouped_backward(
        model, group, random_loss(group), prompt_kv=prompt_kv, schedule=schedule
    )
    assert error(gradients(model), exact) < 1e-5
    assert report.prompt_kv_error is not None and report.prompt_kv_error < 1e-6


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [((48, None, 49), "layer 0 has 48 tokens, and needs 49"), ((None, 59, None), "needs 60")],
)
def test_prompt_kv_without_tokens_that_are_read_is_refused(
    num_tokens: tuple[int | None, ...], reason: str
) -> None:
    model_class, config = WINDOWED["alternating"]
    model, group = model_class(config).train(), random_group()
    prompt_kv = only_windows(compute_prompt_kv(model, group), num_tokens)
    with pytest.raises(ValueError, match=reason):
        group_logprobs(model, group, prompt_kv)


def test_checkpointed_windows_and_sinks_have_the_padded_gradient() -> None:
    model_class, config = WINDOWED["sinks"]
    torch.manual_seed(0)
    model = model_class(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_padded_gradient(model)


def test_window_that_is_only_in_the_mask_is_refused() -> None:
    """Models of this class pass no window to the attention interface."""
    layers = ["full_attention", "sliding_attention", "full_attention"]
    config = Qwen2MoeConfig(
        **SIZES, use_sliding_window=True, sliding_window=50, layer_types=layers, num_experts=4
    )
    refused(Qwen2MoeForCausalLM(config).train(), "does not pass its sliding window")


def test_chunked_attention_is_refused() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["chunked_attention"] * 3
    refused(model, "layers of type chunked_attention")


def test_window_that_covers_every_row_is_allowed() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=200)).train()
    group = random_group()
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    grouped_backward(model, group, random_loss(group))
    assert error(gradients(model), exact) < 1e-5


def test_soft_capped_scores_are_refused() -> None:
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, sliding_window=512))
    refused(model.train(), "softcap")


def test_attention_dropout_is_refused() -> None:
    refused(tiny_model("llama", attention_dropout=0.1), "dropout")


def test_layer_dropout_is_refused() -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4)
    refused(GPT2LMHeadModel(config).train(), "dropout")


class DeafModel(torch.nn.Module):
    """Does not pass keyword arguments on to its layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.dtype = model, model.config, model.dtype

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
        return self.model(input_ids=input_ids, position_ids=position_ids)


def test_model_that_drops_keyword_arguments_is_refused() -> None:
    refused(DeafModel(tiny_model()), "does not pass its keyword arguments")


def test_layers_without_the_attention_interface_are_refused() -> None:
    model = tiny_model()
    model.config.num_hidden_layers = 4
    refused(model, "3 of 4 layers")


def chosen(model_info: ModelInfo, *, has_prompt_kv: bool = False, prompt_tokens: int = 2000) -> str:
    model = tiny_model()
    group = random_group(prompt_tokens=prompt_tokens)
    return choose(
        "auto", model.config, group, model_info, has_prompt_kv=has_prompt_kv, pass_tokens=1000
    )


def model_info(**options: Any) -> ModelInfo:
    known: dict[str, Any] = {
        "num_layers": 3,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "checkpointed": False,
        "reentrant": False,
        "sharded": False,
    }
    return ModelInfo(**known | options)


def test_schedule_follows_from_the_model_and_the_group() -> None:
    assert chosen(model_info()) == "kept"
    assert chosen(model_info(), prompt_tokens=100) == "packed"
    assert chosen(model_info(), has_prompt_kv=True) == "recomputed"
    assert chosen(model_info(reentrant=True)) == "injected"
    assert chosen(model_info(reentrant=True), prompt_tokens=100) == "packed"
    assert chosen(model_info(reentrant=True), has_prompt_kv=True) == "injected"
    # Ranks must agree, for any lengths of their groups.
    assert chosen(model_info(sharded=True), prompt_tokens=100) == "injected"


def test_graph_that_does_not_fit_in_memory_is_not_kept() -> None:
    assert chosen(model_info(num_layers=10**9)) == "recomputed"
    assert not graph_fits(tiny_model().config, 10**9, model_info())
    assert graph_fits(tiny_model().config, 1, model_info())


def test_unknown_free_memory_counts_as_sufficient() -> None:
    assert free_bytes(torch.device("meta")) is None
    assert graph_fits(tiny_model().config, 10**12, model_info(device=torch.device("meta")))


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, []),
        ({"memory.max": "max", "memory.current": "5"}, []),
        (
            {
                "memory.max": "1000",
                "memory.current": "900",
                "memory.stat": "anon 700\ninactive_file 150\n",
            },
            [250],
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "1200",
                "memory/memory.stat": "cache 1\ntotal_inactive_file 100\n",
            },
            [0],
        ),
    ],
)
def test_container_memory_limit_is_detected(
    tmp_path: Path, files: dict[str, str], left: list[int]
) -> None:
    """It may have only a part of the machine's free memory."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(cgroup_free_bytes(tmp_path)) == left


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_estimate_of_graph_memory_is_close_to_its_size(
    family: str, dtype: torch.dtype, checkpointed: bool
) -> None:
    model = tiny_model(family, dtype=dtype, num_hidden_layers=6)
    if checkpointed:
        model.gradient_checkpointing_enable()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tokens = torch.zeros(1, 300, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    assert output.requires_grad
    size = sum(nbytes for pointer, nbytes in kept.items() if pointer not in weights)
    estimate = graph_bytes(model.config, 300, get_model_info(model))
    assert size < estimate < 2 * size


@pytest.mark.parametrize("schedule", ["kept", "packed"])
def test_schedule_that_prefills_the_prompt_refuses_prompt_kv(schedule: Any) -> None:
    group = random_group()
    with pytest.raises(ValueError, match="omit prompt_kv"):
        choose(
            schedule, tiny_model().config, group, model_info(), has_prompt_kv=True, pass_tokens=1
        )


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule: best"):
        grouped_backward(
            tiny_model(),
            random_group(),
            random_loss(random_group()),
            schedule="best",  # type: ignore[arg-type]
        )


def test_mixture_of_experts_has_the_padded_gradient() -> None:
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, head_dim=16, **sparse)).train()
    group = random_group()
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    for schedule in SCHEDULES:
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=100)
        assert error(gradients(model), exact) < 1e-5, schedule


def test_gated_delta_net_is_refused() -> None:
    layers = ["linear_attention", "full_attention", "linear_attention"]
    sizes = {**SIZES, "num_hidden_layers": len(layers)}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, head_dim=16, layer_types=layers))
    refused(model.train(), "1 of 3 layers")
