"""Reader of safetensors checkpoints without torch: index of tensors, and their bytes.

Imports neither torch nor vLLM: the service reads it in a thread while the engine generates. Any
defect raises CheckpointRefused. Messages name files and tensors, never directories.

Files are read, never mapped. A file that is truncated while mapped kills the process with SIGBUS,
while a short read can be handled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from coppice.safetensors_io import FLOAT_BYTES, MAX_HEADER_BYTES, TensorEntry, read_header
from coppice.weights import checkpoint_files
from coppice.weights.checkpoint_files import INDEX, SINGLE_FILE
from engine.errors import CheckpointRefused

CHUNK_BYTES: Final = 2**19  # stays in a core's cache between reading and checking
MAX_PRINTED_CHARACTERS: Final = 120
LM_HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "embed_tokens.weight"
MAX_LISTED_NAMES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor(TensorEntry):
    """Location of a tensor: bytes `start` to `end` (end excluded) of `file`, row-major."""

    file: Path


def read_ranges(tensor: StoredTensor, starts: Sequence[int], buffer: memoryview) -> None:
    """Read ranges of a tensor's bytes, all of the same length, into `buffer`, which they fill."""
    length = len(buffer) // len(starts)
    with _open_at_tensor(tensor) as stream:
        for number, start in enumerate(starts):
            stream.seek(tensor.start + start)
            _read_exactly(buffer[number * length : (number + 1) * length], stream, tensor)


def read_chunks(tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in chunks that share one buffer, so use each before the next."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, tensor.num_bytes)))
    with _open_at_tensor(tensor) as stream:
        for start in range(0, tensor.num_bytes, CHUNK_BYTES):
            chunk = buffer[: tensor.num_bytes - start]
            _read_exactly(chunk, stream, tensor)
            yield chunk


@contextmanager
def _open_at_tensor(tensor: StoredTensor) -> Iterator[FileIO]:
    try:
        with FileIO(tensor.file) as stream:
            stream.seek(tensor.start)
            yield stream
    except OSError as error:
        name = printable(tensor.file.name)
        raise CheckpointRefused(f"{name} cannot be read: {error.strerror}") from None


def _read_exactly(buffer: memoryview, stream: FileIO, tensor: StoredTensor) -> None:
    while buffer:
        num_read = stream.readinto(buffer)
        if not num_read:
            raise CheckpointRefused(
                f"{printable(tensor.file.name)} ends within {printable(tensor.name)}: "
                "it changed after its header was read"
            )
        buffer = buffer[num_read:]


def printable(name: str) -> str:
    """Escape a name from an untrusted file for messages."""
    return name[:MAX_PRINTED_CHARACTERS].encode("unicode_escape").decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Index of a checkpoint's tensors by name. The files must stay in place, as none is open."""

    tensors: Mapping[str, StoredTensor]

    def without_tensor(self, name: str) -> "Checkpoint":
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n != name})

    @property
    def embedding(self) -> StoredTensor | None:
        """The token embedding, or None if names do not identify exactly one."""
        found = [tensor for name, tensor in self.tensors.items() if name.endswith(EMBEDDING)]
        return found[0] if len(found) == 1 else None


NO_TENSORS: Final = Checkpoint(tensors={})
"""Index for an engine with random weights, which have no files."""


def read_checkpoint(path: Path, *, follow_links: bool = False) -> Checkpoint:
    """Index a .safetensors file, or a directory with model.safetensors or with shards.

    Every file must be complete and contain nothing but its tensors. A file outside the directory is
    refused, as is a link to one unless `follow_links`.
    """
    try:
        tensors = dict(_tensors(path, follow_links))
    except OSError as error:
        name = printable(Path(error.filename or path).name)
        raise CheckpointRefused(f"{name} cannot be read: {error.strerror}") from None
    if not tensors:
        raise CheckpointRefused("the checkpoint has no tensors")
    return Checkpoint(tensors=tensors)


def read_base_checkpoint(path: Path) -> Checkpoint:
    """Index the checkpoint that the engine started from, against which later ones are checked.

    Links are followed, since hub caches consist of them. A head that the model's config ties to the
    embedding is left out, since the model never loads it.
    """
    served = read_checkpoint(path, follow_links=True)
    config = (path if path.is_dir() else path.parent) / "config.json"
    if config.is_file() and read_json(config).get("tie_word_embeddings") is True:
        return served.without_tensor(LM_HEAD)
    return served


def check_same_tensors(served: Checkpoint, candidate: Checkpoint) -> None:
    """Check that a candidate has the tensor names and shapes of the served checkpoint.

    Any of the dtypes BF16, F16 and F32 is allowed and converted on loading. A served checkpoint
    with other dtypes is quantized, and has scales that no candidate has.
    """
    ours, theirs = served.tensors, candidate.tensors
    for name in sorted(ours):
        if ours[name].dtype not in FLOAT_BYTES:
            raise CheckpointRefused(
                f"the served checkpoint is quantized ({printable(name)} has dtype "
                f"{ours[name].dtype}), so its weights cannot be updated; start with an unquantized "
                "checkpoint and engine.quantization to quantize every weights version on loading"
            )
    shapes = [n for n in sorted(ours.keys() & theirs.keys()) if ours[n].shape != theirs[n].shape]
    dtypes = [n for n in sorted(theirs) if theirs[n].dtype not in FLOAT_BYTES]
    differences = [
        _describe_differences("missing", sorted(ours.keys() - theirs.keys()), printable),
        _describe_differences("unknown", sorted(theirs.keys() - ours.keys()), printable),
        _describe_differences(
            "shape", shapes, lambda n: f"{n} {theirs[n].shape}, served {ours[n].shape}"
        ),
        _describe_differences(
            "dtype", dtypes, lambda n: f"{printable(n)} {theirs[n].dtype}, must be BF16, F16 or F32"
        ),
    ]
    if any(differences):
        raise CheckpointRefused("; ".join(filter(None, differences)))


def _describe_differences(kind: str, names: list[str], show: Callable[[str], str]) -> str:
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return f"{kind}: {', '.join(map(show, names[:MAX_LISTED_NAMES]))}{more}" if names else ""


def _tensors(path: Path, follow_links: bool) -> Iterator[tuple[str, StoredTensor]]:
    directory = path if path.is_dir() else path.parent
    for name, mapped in _list_files(path).items():
        found = _read_file(_resolve_file(directory, name, follow_links))
        if mapped is not None and mapped != found.keys():
            tensor = min(mapped ^ found.keys())
            lacking = name if tensor in mapped else INDEX
            raise CheckpointRefused(f"{printable(lacking)} does not contain {printable(tensor)}")
        yield from found.items()


def _list_files(path: Path) -> Mapping[str, set[str] | None]:
    """Names of a checkpoint's files, each with its tensors according to the shard index."""
    if path.is_file():
        return {path.name: None}
    if not path.is_dir():
        raise CheckpointRefused("the checkpoint does not exist")
    single, sharded = (path / SINGLE_FILE).exists(), (path / INDEX).exists()
    if single and sharded:
        raise CheckpointRefused(f"{SINGLE_FILE} and {INDEX} both exist; remove one of them")
    if not single and not sharded:
        raise CheckpointRefused(
            f"neither {SINGLE_FILE} nor {INDEX} exists; one of them is required"
        )
    return {SINGLE_FILE: None} if single else read_shards(path / INDEX)


def read_shards(index: Path) -> dict[str, set[str] | None]:
    """Names of the files in a checkpoint index, each with the names of its tensors."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointRefused(f"{INDEX} has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointRefused(f"{INDEX} maps {printable(tensor)} to no .safetensors file")
        shards.setdefault(file, set()).add(tensor)
    return dict(shards)


def _resolve_file(directory: Path, name: str, follow_links: bool) -> Path:
    file = directory / name
    if Path(name).name != name:
        raise CheckpointRefused(f"{printable(name)} is not a plain file name")
    if not file.is_file():
        raise CheckpointRefused(f"{printable(name)} is missing")
    if not follow_links and not file.resolve().is_relative_to(directory.resolve()):
        raise CheckpointRefused(f"{printable(name)} is a link to a file outside the checkpoint")
    return file


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object from an untrusted file."""
    with path.open("rb") as stream:
        content = stream.read(MAX_HEADER_BYTES + 1)
    if len(content) > MAX_HEADER_BYTES:
        raise CheckpointRefused(f"{path.name} is larger than {MAX_HEADER_BYTES} bytes")
    try:
        value = from_json(content)  # unlike json.loads it refuses lone surrogates
    except ValueError:
        raise CheckpointRefused(f"{path.name} is not JSON") from None
    if not isinstance(value, dict):
        raise CheckpointRefused(f"{path.name} is not a JSON object")
    return value


def _read_file(file: Path) -> dict[str, StoredTensor]:
    """Index the tensors of one safetensors file."""
    try:
        tensors = read_header(file).tensors
    except ValueError as error:
        raise CheckpointRefused(
            f"{printable(file.name)} is not a valid safetensors file: {printable(str(error))}"
        ) from None
    return {
        name: StoredTensor(
            name=name, dtype=t.dtype, shape=t.shape, file=file, start=t.start, end=t.end
        )
        for name, t in tensors.items()
    }


def fingerprint(path: Path) -> str:
    """Digest of the names, sizes and times of weight files; empty if they are being replaced."""
    try:
        return checkpoint_files.fingerprint(path)
    except OSError:
        return ""
