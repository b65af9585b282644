"""Validation of checkpoints and PEFT LoRA adapters: names, shapes, finite values.

Imports neither torch nor vLLM. Messages name files and tensors, never directories.

Values must be finite in the served dtype. numpy checks chunks of the files, so memory is bounded
and other threads keep running. Each byte is read once, at more than a gigabyte per second.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from coppice.safetensors_io import FLOAT_BYTES
from engine.errors import CheckpointRefused
from engine.types.samples import AdapterInfo
from engine.weights.checkpoint import (
    LM_HEAD,
    Checkpoint,
    StoredTensor,
    check_same_tensors,
    printable,
    read_checkpoint,
    read_chunks,
    read_json,
)
from engine.weights.magnitudes import UNKNOWN, Magnitudes, largest_magnitude

# The smallest non-finite magnitude, as bits. Magnitudes of floats sort like their bits.
NON_FINITE_BITS: Final = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000}
# The same after conversion (to nearest, ties to even), where it is smaller: 65520 and up overflow
# in float16, the largest bfloat16 plus half a step overflows in bfloat16.
OVERFLOW_BITS: Final = {
    ("BF16", "float16"): 0x4780,
    ("F32", "float16"): 0x477F_F000,
    ("F32", "bfloat16"): 0x7F7F_8000,
}
ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
ADAPTER_TENSORS_FILE: Final = "adapter_model.safetensors"
TARGET_MODULES: Final = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)
"""Modules that may have adapters: the projections of attention and of a dense MLP."""
EXPERTS_PATH: Final = ".experts."
PREFIX: Final = "base_model.model."
NUM_THREADS: Final = 2
PLAIN_NAME: Final = re.compile(r"[\w.]+")
MAX_PATTERNS: Final = 4096
"""Maximum keys of a PEFT pattern: vLLM tries each one on each module while no request runs."""
MAX_ALPHA: Final = 2**53
REQUIRED_FIELDS: Final = ("r", "lora_alpha", "target_modules")
LORA_SUFFIXES: Final = (".lora_A.weight", ".lora_B.weight")
# With any other value the adapter is not plain LoRA.
PLAIN_LORA_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "fan_in_fan_out": (False,),
}


def check_checkpoint(
    served: Checkpoint,
    candidate: Path,
    *,
    dtype: str = "float32",
    magnitudes: Magnitudes = UNKNOWN,
) -> Checkpoint:
    """Check that the engine can load a candidate checkpoint; returns its index.

    Raises CheckpointRefused with the reason if it cannot.

    `served` is `read_base_checkpoint` of the files that the engine started from, `dtype` the
    engine's dtype. A head that only repeats a tied embedding is left out of the result.
    `magnitudes` are those of a candidate of one file, as far as they are known: other values are
    read from the files.
    """
    index = _without_tied_head(served, read_checkpoint(candidate))
    check_same_tensors(served, index)
    ordered = sorted(index.tensors.values(), key=lambda t: (t.file, t.start))
    known = [magnitudes.get(tensor.name) for tensor in ordered]
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="check-weights") as threads:
        # raises the first exception
        deque(threads.map(check_values, ordered, repeat(dtype), known), 0)
    return index


def _without_tied_head(served: Checkpoint, candidate: Checkpoint) -> Checkpoint:
    """Leave out a tied LM head, which a trainer's state dict may contain but the model ignores."""
    head, embedding = candidate.tensors.get(LM_HEAD), candidate.embedding
    if head is None or embedding is None or LM_HEAD in served.tensors:
        return candidate
    if not _have_equal_bytes(head, embedding):
        raise CheckpointRefused(
            f"{LM_HEAD} differs from {printable(embedding.name)}, but this model ties its "
            "head to its embedding; leave the head out"
        )
    return candidate.without_tensor(LM_HEAD)


def _have_equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(read_chunks(one), read_chunks(other), strict=True)
    return all(bytes(ours) == bytes(theirs) for ours, theirs in pairs)


def check_values(tensor: StoredTensor, dtype: str, largest: int | None = None) -> None:
    """Raise CheckpointRefused unless all values of a tensor are finite in `dtype`.

    `largest`: bits of the largest magnitude, if it is known.
    """
    not_finite = NON_FINITE_BITS[tensor.dtype]
    limit = OVERFLOW_BITS.get((tensor.dtype, dtype), not_finite)
    if largest is None:
        chunks = read_chunks(tensor)
        largest = max((largest_magnitude(chunk, tensor.dtype) for chunk in chunks), default=0)
    if largest >= not_finite:
        raise CheckpointRefused(f"{printable(tensor.name)} contains NaN or infinity")
    if largest >= limit:
        raise CheckpointRefused(
            f"{printable(tensor.name)} has values that overflow in {dtype}, the engine's dtype"
        )


def check_adapter(
    served: Checkpoint, adapter: Path, *, max_rank: int, dtype: str = "float32"
) -> AdapterInfo:
    """Check that the engine can serve a LoRA adapter.

    Raises CheckpointRefused with the reason if it cannot be served over `served`.
    """
    ranks = _ranks(_read_adapter_config(adapter), max_rank)
    tensors = read_checkpoint(adapter / ADAPTER_TENSORS_FILE).tensors
    modules = _tensors_by_module(tensors)
    for module, matrices in sorted(modules.items()):
        _check_module(served, module, matrices, ranks)
    for tensor in tensors.values():
        check_values(tensor, dtype)
    return AdapterInfo(
        rank=max(ranks),
        num_modules=len(modules),
        num_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
    )


def _read_adapter_config(adapter: Path) -> dict[str, Any]:
    path = adapter / ADAPTER_CONFIG_FILE
    if not path.is_file():
        raise CheckpointRefused(f"{ADAPTER_CONFIG_FILE} is missing")
    config = read_json(path)
    missing = [name for name in REQUIRED_FIELDS if name not in config]
    if missing:
        raise CheckpointRefused(f"{ADAPTER_CONFIG_FILE} has no {', '.join(missing)}")
    if config.get("peft_type", "LORA") != "LORA":
        raise CheckpointRefused(f"{ADAPTER_CONFIG_FILE}: peft_type must be LORA")
    for name, plain in PLAIN_LORA_VALUES.items():
        if name in config and config[name] not in plain:
            raise CheckpointRefused(
                f"{ADAPTER_CONFIG_FILE}: {name} is not supported; set it to PEFT's default"
            )
    return config


def _ranks(config: Mapping[str, Any], max_rank: int) -> set[int]:
    for name in ("rank_pattern", "alpha_pattern"):
        _check_pattern(name, config.get(name) or {})
    _check_alphas([config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()])
    patterns = config.get("rank_pattern") or {}
    named = [config["r"], *(patterns.values() if isinstance(patterns, dict) else [None])]
    ranks = {rank for rank in named if type(rank) is int and rank > 0}
    if any(type(rank) is not int or rank <= 0 for rank in named):
        raise CheckpointRefused(
            f"{ADAPTER_CONFIG_FILE}: r and rank_pattern must be positive integers"
        )
    if max(ranks) > max_rank:
        raise CheckpointRefused(
            f"rank {max(ranks)} exceeds {max_rank}, the server's engine.max_adapter_rank"
        )
    return ranks


def _check_pattern(name: str, pattern: object) -> None:
    """Require plain module names in a PEFT pattern; vLLM matches them as regular expressions."""
    if not isinstance(pattern, dict) or not all(map(PLAIN_NAME.fullmatch, pattern)):
        raise CheckpointRefused(
            f"{ADAPTER_CONFIG_FILE}: the keys of {name} must be plain module names, not patterns"
        )
    if len(pattern) > MAX_PATTERNS:
        raise CheckpointRefused(f"{ADAPTER_CONFIG_FILE}: {name} has more than {MAX_PATTERNS} keys")


def _check_alphas(alphas: Sequence[object]) -> None:
    # NaN compares as false, and an integer may be too large for a float.
    if not all(type(alpha) in (int, float) and abs(alpha) <= MAX_ALPHA for alpha in alphas):  # type: ignore[arg-type]
        raise CheckpointRefused(
            f"{ADAPTER_CONFIG_FILE}: lora_alpha and alpha_pattern must be numbers of at most 2^53"
        )


def _tensors_by_module(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """The LoRA matrices A and B of each adapted module, by module name."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in LORA_SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            raise CheckpointRefused(
                f"{printable(name)} is not a LoRA matrix: its name must end in "
                ".lora_A.weight or .lora_B.weight"
            )
        module = name.removesuffix(suffix).removeprefix(PREFIX)
        modules.setdefault(module, {})[suffix] = tensor
    return modules


def _check_module(
    served: Checkpoint, module: str, matrices: Mapping[str, StoredTensor], ranks: set[int]
) -> None:
    base = served.tensors.get(f"{module}.weight")
    if base is None:
        raise CheckpointRefused(f"the served model has no module {printable(module)}")
    if module.rpartition(".")[2] not in TARGET_MODULES or EXPERTS_PATH in module:
        raise CheckpointRefused(
            f"{printable(module)} cannot have an adapter; supported are the projections of "
            "attention and of a dense MLP"
        )
    if len(matrices) < len(LORA_SUFFIXES):
        raise CheckpointRefused(f"{printable(module)} has only one of lora_A and lora_B")
    for tensor in matrices.values():
        if tensor.dtype not in FLOAT_BYTES:
            raise CheckpointRefused(
                f"{printable(tensor.name)} has dtype {tensor.dtype}; it must be BF16, F16 or F32"
            )
    _check_shapes(base, module, matrices, ranks)


def _check_shapes(
    base: StoredTensor, module: str, matrices: Mapping[str, StoredTensor], ranks: set[int]
) -> None:
    lora_a, lora_b = (matrices[suffix] for suffix in LORA_SUFFIXES)
    rank = lora_a.shape[0] if lora_a.shape else 0
    out, inner = base.shape
    if rank not in ranks or (lora_a.shape, lora_b.shape) != ((rank, inner), (out, rank)):
        raise CheckpointRefused(
            f"{printable(module)} has LoRA matrices of shapes {lora_a.shape} and {lora_b.shape}; "
            f"over {base.shape} they must be (r, {inner}) and ({out}, r), with the config's r"
        )
