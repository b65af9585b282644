"""`coppice size`: agreement with the server's sizes, and with the page that shows its output."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config
from typer.testing import CliRunner

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_types import KvFormat, LayerFormat
from engine.settings import GIB
from service.cli import build_cli
from service.prompt_kv.layout import LayoutFactory
from service.sizing import Hardware, ModelShape, SizingError, Workload, sizes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operate" / "sizing.md"
SEEDLING = ROOT / "examples" / "seedling" / "model"
QWEN3_8B = ModelShape(num_parameters=8_190_735_360, num_layers=36, num_kv_heads=8, head_size=128)
WORK = Workload(prompts=64, samples=8, prompt_tokens=1000, response_tokens=4000)
PUBLISHED = {
    "8.19e9": Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "32.76e9": Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "70.55e9": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}
"""Published configurations of Qwen3-8B, Qwen3-32B and Llama-3.3-70B, by number of parameters."""

USUAL_MODELS = (
    "Qwen3-0.6B",
    "Qwen3-8B",
    "Qwen3-32B",
    "Llama-3.1-8B",
    "Llama-3.3-70B",
    "gpt-oss-20b",
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_cli(), ["size", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def hardware(num_ranks: int = 1, cache_bytes: int | None = None) -> Hardware:
    return Hardware(
        num_ranks=num_ranks,
        gpu_bytes=80 * GIB,
        gpu_share=0.9,
        cache_bytes=cache_bytes,
        network_bytes_per_second=1e9,
        disk_bytes_per_second=1e9,
    )


def rows(
    num_ranks: int = 1, cache_bytes: int | None = None, shape: ModelShape = QWEN3_8B
) -> dict[str, str]:
    found = sizes(
        shape,
        WORK,
        hardware(num_ranks, cache_bytes),
        dtype="bfloat16",
        block_size=32,
        retain_superseded=2,
    )
    return {row.name: row.value for row in found}


def examples() -> list[tuple[str, str]]:
    """Commands of the page, as one line each, with their output."""
    text = PAGE.read_text().replace("\\\n", "")
    return re.findall(r"```bash\n(coppice size .+?)\n```\n+```text\n(.+?)```", text, re.DOTALL)


def test_examples_of_the_page_are_the_output_of_the_command() -> None:
    assert len(examples()) >= 4
    for command, output in examples():
        assert run(*shlex.split(command)[2:]) == output, command


@pytest.mark.parametrize("parameters", PUBLISHED)
def test_examples_of_the_page_have_the_published_shapes(parameters: str) -> None:
    config = PUBLISHED[parameters]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(untied(config))
    exact = sum(weight.numel() for weight in model.parameters())
    assert float(parameters) == pytest.approx(exact, rel=1e-3)
    shape = (
        f"--parameters {parameters} --layers {config.num_hidden_layers} "
        f"--kv-heads {config.num_key_value_heads} --head-size {config.head_dim}"
    )
    assert any(shape in " ".join(shlex.split(command)) for command, _ in examples()), shape


def untied(config: PretrainedConfig) -> PretrainedConfig:
    config.tie_word_embeddings = False
    return config


def test_shape_of_a_model_directory_is_read_from_its_files() -> None:
    shape = ModelShape.read(SEEDLING)
    config = PretrainedConfig.get_config_dict(SEEDLING)[0]
    assert shape.num_layers == config["num_hidden_layers"]
    assert shape.num_kv_heads == config["num_key_value_heads"]
    file_bytes = (SEEDLING / "model.safetensors").stat().st_size
    assert 2 * shape.num_parameters == pytest.approx(file_bytes, rel=0.01)


def test_kv_bytes_are_those_of_an_exported_cache() -> None:
    layout = CacheLayout(
        group=0,
        layers=tuple(map(str, range(36))),
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        block_size=32,
        num_ranks=1,
    )
    assert QWEN3_8B.kv_bytes(1000, "bfloat16") == layout.num_bytes(1000)
    page = 4096
    assert 0 < QWEN3_8B.slot_bytes(1000, "bfloat16") - layout.num_bytes(999) < 10 * page


def test_ranks_divide_the_heads_until_they_are_replicated() -> None:
    assert QWEN3_8B.kv_bytes(1, "bfloat16", 8) * 8 == QWEN3_8B.kv_bytes(1, "bfloat16")
    assert QWEN3_8B.kv_bytes(1, "bfloat16", 16) == QWEN3_8B.kv_bytes(1, "bfloat16", 8)


def test_group_holds_its_prompt_once() -> None:
    # 31 full blocks of the first 999 tokens, then 126 blocks per sample up to token 5000.
    assert WORK.group_blocks(32) == 31 + 8 * 126


def test_cache_is_what_the_weights_leave_of_a_gpu() -> None:
    assert rows()["KV cache per rank"] == "52.7 GiB"
    assert rows(num_ranks=2)["KV cache per rank"] == "60.4 GiB"
    assert rows(cache_bytes=GIB)["KV cache per rank"] == "1.0 GiB"


def test_weights_larger_than_the_gpus_are_refused() -> None:
    large = ModelShape(num_parameters=70 * 10**9, num_layers=80, num_kv_heads=8, head_size=128)
    with pytest.raises(SizingError, match="raise --tensor-parallel-size"):
        rows(shape=large)


@pytest.mark.parametrize("arguments", [[], ["--layers", "36"], ["--model", "/none"]])
def test_incomplete_shape_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(build_cli(), ["size", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("coppice: ") and "Traceback" not in result.output


def test_table_of_the_page_is_computed_as_the_command_does() -> None:
    pattern = r"^\| (.+) \| (\d+) x (\d+) x (\d+) \| (\d+) \| ([\d.]+) \|$"
    table = re.findall(pattern, PAGE.read_text(), re.MULTILINE)
    named = " ".join(models for models, *_ in table)
    assert [model for model in USUAL_MODELS if model not in named] == []
    for models, layers, heads, head_size, kv_kib, prompt_mib in table:
        shape = ModelShape(
            num_parameters=1,
            num_layers=int(layers),
            num_kv_heads=int(heads),
            head_size=int(head_size),
        )
        assert shape.kv_bytes(2**10, "bfloat16") == int(kv_kib) * 2**20
        has_windows = models.startswith("gpt-oss")
        num_bytes = (
            windowed_slot_bytes(shape) if has_windows else shape.slot_bytes(1000, "bfloat16")
        )
        assert prompt_mib == f"{num_bytes / 2**20:.1f}", models


def windowed_slot_bytes(shape: ModelShape) -> int:
    """Bytes of 1,000 tokens if every second layer has a window of 128, and blocks have 16."""
    full = LayerFormat(num_kv_heads=shape.num_kv_heads, head_dim=shape.head_size)
    layers = [full, replace(full, window=128, block_size=16, region=1)] * (shape.num_layers // 2)
    kv_format = KvFormat.of_layers(layers, dtype="bfloat16", rope={})
    return LayoutFactory("model", kv_format).of([0] * 999, "v0").slot_bytes
