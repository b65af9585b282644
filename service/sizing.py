"""Memory, disk and transfer sizes of a deployment, from the shape of its model and its workload.

`coppice size` prints them. It loads no model and needs no GPU. Rows marked `estimate` depend on
assumed constants; the others are exact.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import typer

from engine.errors import CheckpointRefused
from engine.kv_types import KvFormat
from engine.settings import GIB, EngineSettings
from engine.weights.checkpoint import read_base_checkpoint, read_json
from service.config.settings import WeightsSettings
from service.prompt_kv.arena import MAX_FREE_SHARE
from service.prompt_kv.layout import LayoutFactory

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
GPU_RESERVE_BYTES = 4 * GIB
"""Estimate of activations and CUDA graphs on each GPU."""
ENGINE_SHM_BYTES = 2 * GIB
"""Estimate of vLLM's queues between processes; `shm.engine` of the chart's example for a GPU."""
HOST_BYTES_PER_PROCESS = 4 * GIB
"""Estimate of the memory of the service, of EngineCore and of each worker."""
_ENGINE, _WEIGHTS = EngineSettings.model_fields, WeightsSettings.model_fields


class SizingError(Exception):
    """Raised for a model that cannot be read, or that does not fit; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Number of parameters and shape of the KV cache of a decoder with plain attention."""

    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_size: int

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Shape of a model directory, from its config.json and the headers of its weights."""
        try:
            config = read_json(directory / "config.json")
            tensors = read_base_checkpoint(directory).tensors.values()
            text = config.get("text_config", config)
            num_heads = text["num_attention_heads"]
            return cls(
                num_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
                num_layers=text["num_hidden_layers"],
                num_kv_heads=text.get("num_key_value_heads") or num_heads,
                head_size=text.get("head_dim") or text["hidden_size"] // num_heads,
            )
        except (OSError, CheckpointRefused) as error:
            raise SizingError(f"{directory}: {error}") from None
        except KeyError as error:
            raise SizingError(f"{directory}/config.json has no {error}") from None

    def kv_bytes(self, num_tokens: int, dtype: Dtype, num_ranks: int = 1) -> int:
        """Bytes of keys and values on one of `num_ranks` tensor-parallel ranks.

        vLLM replicates heads if there are fewer than ranks.
        """
        num_heads = math.ceil(self.num_kv_heads / num_ranks)
        return 2 * self.num_layers * num_heads * self.head_size * DTYPE_BYTES[dtype] * num_tokens

    def slot_bytes(self, prompt_tokens: int, dtype: Dtype) -> int:
        """Bytes of the prompt-KV arena that one prompt takes; its last token is not exported."""
        kv_format = KvFormat(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            dtype=dtype,
            rope={},
        )
        return LayoutFactory("model", kv_format).of([0] * (prompt_tokens - 1), "v0").slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Rollout work of one training step on one replica. Every response has its maximum length."""

    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int

    def group_blocks(self, block_size: int) -> int:
        """KV cache blocks of one group: full blocks of the prompt are shared by its samples."""
        shared = (self.prompt_tokens - 1) // block_size
        total = math.ceil((self.prompt_tokens + self.response_tokens) / block_size)
        return shared + self.samples * (total - shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Memory and bandwidth of one replica. `cache_bytes` is per rank; None: derived from the GPU.

    `gpu_share` is `engine.gpu_memory_utilization`.
    """

    num_ranks: int
    gpu_bytes: int
    gpu_share: float
    cache_bytes: int | None
    network_bytes_per_second: float
    disk_bytes_per_second: float

    @property
    def num_processes(self) -> int:
        """The service, EngineCore, and one worker per rank; a single rank runs in EngineCore."""
        return 2 if self.num_ranks == 1 else self.num_ranks + 2


class Row(NamedTuple):
    """One line of the report."""

    name: str
    value: str
    source: str


def sizes(
    model: ModelShape,
    work: Workload,
    hardware: Hardware,
    *,
    dtype: Dtype,
    block_size: int,
    retain_superseded: int,
) -> list[Row]:
    """Rows of the report on one replica. Raises SizingError if the model does not fit."""
    weights = model.num_parameters * DTYPE_BYTES[dtype]
    cache = _cache_bytes(weights, hardware)
    num_blocks = cache // model.kv_bytes(block_size, dtype, hardware.num_ranks)
    groups = num_blocks // work.group_blocks(block_size)
    slot = model.slot_bytes(work.prompt_tokens, dtype)
    return [
        Row("weights", _size(weights), f"parameters x {DTYPE_BYTES[dtype]} bytes"),
        Row("weights per rank", _size(weights // hardware.num_ranks), "split over the ranks"),
        Row("KV cache per rank", _size(cache), _cache_source(hardware)),
        Row("KV per token", f"{model.kv_bytes(1, dtype) / 2**10:.0f} KiB", "over all ranks"),
        Row("KV cache capacity", f"{num_blocks * block_size:,} tokens", f"{num_blocks:,} blocks"),
        Row(
            "concurrent samples",
            f"{groups * work.samples:,}",
            f"{groups:,} whole groups of {work.samples}, at full length",
        ),
        *_prompt_kv_rows(slot, work.prompts, hardware),
        *_storage_rows(weights, retain_superseded, hardware),
    ]


def _prompt_kv_rows(slot: int, num_prompts: int, hardware: Hardware) -> Iterator[Row]:
    arena = slot * num_prompts
    shared = ENGINE_SHM_BYTES + arena
    processes = hardware.num_processes * HOST_BYTES_PER_PROCESS
    yield Row("prompt KV per prompt", _size(slot), "exact to a page of 4 KiB")
    yield Row("kv.capacity_bytes", _size(arena), f"{num_prompts:,} prompts of one step")
    yield Row(
        "free space of /dev/shm", _size(int(arena / MAX_FREE_SHARE)), "the arena takes at most half"
    )
    yield Row("host memory", _size(processes + shared), "estimate: processes, queues and the arena")


def _storage_rows(weights: int, retain_superseded: int, hardware: Hardware) -> Iterator[Row]:
    num_versions = retain_superseded + 3
    upload = weights / min(hardware.network_bytes_per_second, hardware.disk_bytes_per_second)
    read = weights / hardware.disk_bytes_per_second
    yield Row("weights.directory", _size(weights * num_versions), f"{num_versions} versions")
    yield Row("upload", f"{upload:.1f} s", "estimate: network or disk, whichever is slower")
    yield Row("check of the values", f"{read:.1f} s", "estimate: one read of the file")
    yield Row(
        "activation",
        f"{read:.1f} s",
        "estimate: the ranks together read the file once, nothing is cached",
    )


def _cache_bytes(weights: int, hardware: Hardware) -> int:
    if hardware.cache_bytes is not None:
        return hardware.cache_bytes
    usable = int(hardware.gpu_bytes * hardware.gpu_share) - GPU_RESERVE_BYTES
    left = usable - weights // hardware.num_ranks
    if left <= 0:
        raise SizingError(
            f"the weights take {_size(weights // hardware.num_ranks)} per rank, of "
            f"{_size(max(usable, 0))}: raise --tensor-parallel-size"
        )
    return left


def _cache_source(hardware: Hardware) -> str:
    if hardware.cache_bytes is not None:
        return "engine.cache_bytes"
    return (
        f"estimate: {hardware.gpu_share:g} x {_size(hardware.gpu_bytes)}, less weights and "
        f"{_size(GPU_RESERVE_BYTES)}"
    )


def _size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 2**10:.1f} KiB"


def render(rows: list[Row]) -> str:
    """Text table of the rows."""
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{row.name:<{widths[0]}}  {row.value:>{widths[1]}}  {row.source}" for row in rows
    )


def size(
    model: Annotated[
        Path | None, typer.Option(help="Model directory; replaces the next four options.")
    ] = None,
    parameters: Annotated[float, typer.Option(help="Number of parameters, such as 8.19e9.")] = 0,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 0,
    kv_heads: Annotated[int, typer.Option(help="Number of KV heads.")] = 0,
    head_size: Annotated[int, typer.Option(help="Size of a head.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Data type of weights and KV cache.")] = "bfloat16",
    tensor_parallel_size: Annotated[int, typer.Option(help="Number of ranks.", min=1)] = 1,
    gpu_gib: Annotated[float, typer.Option(help="Memory of one GPU, in GiB.")] = 80,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU for the engine.", min=0, max=1)
    ] = _ENGINE["gpu_memory_utilization"].default,
    cache_gib: Annotated[
        float | None,
        typer.Option(
            help="KV cache per rank, in GiB. By default, the GPU memory that the weights leave."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV cache block.", min=1)] = _ENGINE[
        "block_size"
    ].default
    or 16,
    prompts: Annotated[int, typer.Option(help="Prompts per training step.", min=1)] = 64,
    samples: Annotated[int, typer.Option(help="Samples per prompt.", min=1)] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", min=2)] = 1000,
    response_tokens: Annotated[int, typer.Option(help="Tokens per response.", min=1)] = 4000,
    retain_superseded: Annotated[
        int, typer.Option(help="Superseded weights versions on disk.", min=0)
    ] = _WEIGHTS["retain_superseded"].default,
    network_gbit: Annotated[
        float, typer.Option(help="Bandwidth from the trainer, in Gbit per second.", min=0.001)
    ] = 25,
    disk_gib: Annotated[
        float,
        typer.Option(help="Bandwidth of the disk with the weights, in GiB per second.", min=0.001),
    ] = 2,
) -> None:
    """Print the memory, disk and transfer sizes of one replica; loads no model."""
    try:
        shape = _shape(model, parameters, layers, kv_heads, head_size)
        rows = sizes(
            shape,
            Workload(
                prompts=prompts,
                samples=samples,
                prompt_tokens=prompt_tokens,
                response_tokens=response_tokens,
            ),
            Hardware(
                num_ranks=tensor_parallel_size,
                gpu_bytes=int(gpu_gib * GIB),
                gpu_share=gpu_memory_utilization,
                cache_bytes=None if cache_gib is None else int(cache_gib * GIB),
                network_bytes_per_second=network_gbit * 1e9 / 8,
                disk_bytes_per_second=disk_gib * GIB,
            ),
            dtype=dtype,
            block_size=block_size,
            retain_superseded=retain_superseded,
        )
    except SizingError as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(render(rows))


def _shape(
    directory: Path | None, parameters: float, layers: int, kv_heads: int, head_size: int
) -> ModelShape:
    if directory is not None:
        return ModelShape.read(directory)
    if min(parameters, layers, kv_heads, head_size) <= 0:
        raise SizingError("give --model, or --parameters, --layers, --kv-heads and --head-size")
    return ModelShape(
        num_parameters=int(parameters),
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_size=head_size,
    )
