import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from engine.errors import CheckpointRefused
from engine.weights.checkpoint import (
    Checkpoint,
    read_base_checkpoint,
    read_checkpoint,
    read_chunks,
    read_ranges,
)
from engine.weights.validation import check_checkpoint
from tests.engine.random_models import Tensors
from tests.sample_sizes import num_examples

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def small() -> Tensors:
    draw = np.random.default_rng(3)
    return {
        NORM: draw.normal(size=5).astype(np.float16),  # leaves the next tensor unaligned
        EMBEDDING: draw.normal(size=(7, 3)).astype(np.float32),
        "model.layers.0.mlp.up_proj.weight": draw.normal(size=(3, 4)).astype(np.float32),
        "model.layers.0.mlp.down_proj.weight": draw.normal(size=(4, 3)).astype(np.float32),
    }


def write(directory: Path, tensors: Tensors, name: str = "model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / name, metadata={"format": "pt"})
    return directory


def write_shards(directory: Path, shards: dict[str, Tensors], **more: str) -> Path:
    for name, tensors in shards.items():
        write(directory, tensors, name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors} | more
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture
def served(tmp_path: Path) -> Checkpoint:
    return read_base_checkpoint(write(tmp_path / "served", small()))


def bfloat16(values: list[float]) -> bytes:
    return (np.array(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def raw_file(path: Path, name: str, dtype: str, shape: list[int], data: bytes) -> Path:
    header = json.dumps(
        {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_index_has_the_location_of_every_value(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write(tmp_path / "one", small()))
    for name, values in small().items():
        stored = checkpoint.tensors[name]
        buffer = bytearray(stored.num_bytes)
        read_ranges(stored, [0], memoryview(buffer))
        assert stored.shape == values.shape
        assert bytes(buffer) == values.tobytes() == b"".join(map(bytes, read_chunks(stored)))


def test_file_directory_and_shards_are_read_alike(tmp_path: Path, served: Checkpoint) -> None:
    single = write(tmp_path / "one", small())
    names = sorted(small())
    shards = {
        "a.safetensors": {n: small()[n] for n in names[:1]},
        "b.safetensors": {n: small()[n] for n in names[1:]},
    }
    sharded = write_shards(tmp_path / "many", shards)
    for path in (single, single / "model.safetensors", sharded):
        found = check_checkpoint(served, path).tensors
        assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
            n: (t.dtype, t.shape) for n, t in served.tensors.items()
        }


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def header_only(path: Path) -> None:
    os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little"))


def random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(5).bytes(4096))


def a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({name: values.tolist() for name, values in small().items()}))


def trailing_garbage(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def endless_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def overlapping(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        header_only,
        random_bytes,
        a_pickle,
        trailing_garbage,
        empty,
        endless_header,
        overlapping,
    ],
)
def test_damaged_file_is_refused_with_its_defect(
    tmp_path: Path, served: Checkpoint, damage: Callable[[Path], None]
) -> None:
    directory = write(tmp_path / "candidate", small())
    damage(directory / "model.safetensors")
    for path in (directory, directory / "model.safetensors"):
        with pytest.raises(CheckpointRefused, match="model.safetensors") as refusal:
            check_checkpoint(served, path)
        assert str(tmp_path) not in str(refusal.value)


def changed(**changes: Any) -> Tensors:
    tensors = small() | {name.replace("__", "."): values for name, values in changes.items()}
    return {name: values for name, values in tensors.items() if values is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(model__norm__weight=None), "missing: model.norm.weight"),
        (changed(extra=np.zeros(2, np.float32)), "unknown: extra"),
        (
            changed(model__norm__weight=np.zeros(6, np.float32)),
            r"shape: model.norm.weight \(6,\), served \(5,\)",
        ),
        (changed(model__norm__weight=np.zeros(5, np.int8)), "type: model.norm.weight I8"),
        (changed(model__norm__weight=np.zeros(5, np.float64)), "type: model.norm.weight F64"),
        (
            changed(**{f"x{i}": np.zeros(1, np.float32) for i in range(9)}),
            "unknown: x0, x1, x2 and 6 more",
        ),
        (
            changed(model__norm__weight=None, other=np.zeros(1, np.float32)),
            "missing: model.norm.weight; unknown: other",
        ),
        (
            changed(model__norm__weight=np.array([1, 2, np.nan, 4, 5], np.float32)),
            "model.norm.weight contains NaN or infinity",
        ),
        (
            changed(model__norm__weight=np.array([1, 2, 3, 4, -np.inf], np.float16)),
            "model.norm.weight contains NaN or infinity",
        ),
        ({}, "no tensors"),
    ],
)
def test_checkpoint_of_another_model_is_refused_with_its_differences(
    tmp_path: Path, served: Checkpoint, tensors: Tensors, message: str
) -> None:
    with pytest.raises(CheckpointRefused, match=message):
        check_checkpoint(served, write(tmp_path / "candidate", tensors))


def test_weights_of_a_quantized_checkpoint_cannot_be_replaced(tmp_path: Path) -> None:
    """Neither by weights in other dtypes, whose names would all differ, nor by its own."""
    quantized = small() | {"model.layers.0.mlp.up_proj.weight": np.ones((3, 4), np.int8)}
    path = write(tmp_path / "served", quantized)
    for candidate in (path, write(tmp_path / "candidate", small())):
        with pytest.raises(CheckpointRefused, match=r"quantized \(model.layers.0.*dtype I8\)"):
            check_checkpoint(read_base_checkpoint(path), candidate)


def test_float_dtypes_may_replace_each_other(tmp_path: Path, served: Checkpoint) -> None:
    other = {
        n: v.astype(np.float32 if v.dtype == np.float16 else np.float16) for n, v in small().items()
    }
    assert (
        check_checkpoint(served, write(tmp_path / "candidate", other)).tensors.keys()
        == small().keys()
    )


@pytest.mark.parametrize(
    ("dtype", "data", "served_as", "message"),
    [
        ("F32", np.array([65519.99, 1], np.float32).tobytes(), "float16", None),
        ("F32", np.array([65520, 1], np.float32).tobytes(), "float16", "overflow in float16"),
        ("F32", np.array([1, -1e9], np.float32).tobytes(), "float16", "overflow in float16"),
        ("F32", np.array([-1e9, 1], np.float32).tobytes(), "bfloat16", None),
        (
            "F32",
            np.array([3.3961775e38, 1], np.float32).tobytes(),
            "bfloat16",
            "overflow in bfloat16",
        ),
        ("F32", np.array([3.3961773e38, 1], np.float32).tobytes(), "bfloat16", None),
        ("F32", np.array([3.4028235e38, 1], np.float32).tobytes(), "float32", None),
        ("F32", np.array([np.inf, 1], np.float32).tobytes(), "float16", "NaN or infinity"),
        ("BF16", bfloat16([65280, -1]), "float16", None),
        ("BF16", bfloat16([-65536, 1]), "float16", "overflow in float16"),
        ("BF16", bfloat16([3.38e38, 1]), "bfloat16", None),
        ("BF16", bfloat16([1, -np.inf]), "bfloat16", "NaN or infinity"),
        ("BF16", bfloat16([1, np.nan]), "float32", "NaN or infinity"),
        ("F16", np.array([65504, -65504], np.float16).tobytes(), "float16", None),
        ("F16", np.array([1, np.nan], np.float16).tobytes(), "bfloat16", "NaN or infinity"),
    ],
)
def test_values_must_be_finite_in_the_served_dtype(
    tmp_path: Path, dtype: str, data: bytes, served_as: str, message: str | None
) -> None:
    ours = read_base_checkpoint(raw_file(tmp_path / "a.safetensors", NORM, "F32", [2], bytes(8)))
    theirs = raw_file(tmp_path / "b.safetensors", NORM, dtype, [2], data)
    if message is None:
        check_checkpoint(ours, theirs, dtype=served_as)
    else:
        with pytest.raises(CheckpointRefused, match=message):
            check_checkpoint(ours, theirs, dtype=served_as)


def test_every_value_is_checked(tmp_path: Path) -> None:
    size = 2**20 + 3
    values = np.zeros(size, np.float32)
    ours = read_base_checkpoint(write(tmp_path / "served", {NORM: values}))
    for place in (0, 2**17 - 1, 2**17, 2**20, size - 1):
        values[:] = 0
        values[place] = np.nan
        with pytest.raises(CheckpointRefused, match="NaN"):
            check_checkpoint(ours, write(tmp_path / "candidate", {NORM: values}))


def test_repeated_head_of_a_tied_model_is_skipped(tmp_path: Path, served: Checkpoint) -> None:
    tensors = small() | {HEAD: small()[EMBEDDING]}
    index = check_checkpoint(served, write(tmp_path / "candidate", tensors))
    assert index.tensors.keys() == served.tensors.keys()


@pytest.mark.parametrize(
    "head",
    [small()[EMBEDDING] + 1, small()[EMBEDDING].astype(np.float16), small()[EMBEDDING].T.copy()],
    ids=["values", "type", "shape"],
)
def test_separate_head_is_refused_by_a_tied_model(
    tmp_path: Path, served: Checkpoint, head: Any
) -> None:
    candidate = write(tmp_path / "candidate", small() | {HEAD: head})
    with pytest.raises(CheckpointRefused, match="leave the head out"):
        check_checkpoint(served, candidate)


def test_head_of_an_untied_model_is_compared_like_any_tensor(tmp_path: Path) -> None:
    tensors = small() | {HEAD: small()[EMBEDDING] + 1}
    ours = read_base_checkpoint(write(tmp_path / "served", tensors))
    assert HEAD in check_checkpoint(ours, write(tmp_path / "candidate", tensors)).tensors
    with pytest.raises(CheckpointRefused, match="missing: lm_head.weight"):
        check_checkpoint(ours, write(tmp_path / "tied", small()))


def test_head_tied_by_the_config_is_not_required(tmp_path: Path) -> None:
    directory = write(tmp_path / "served", small() | {HEAD: small()[EMBEDDING]})
    (directory / "config.json").write_text('{"tie_word_embeddings": true}')
    check_checkpoint(read_base_checkpoint(directory), write(tmp_path / "candidate", small()))


def test_index_may_only_name_files_beside_it(tmp_path: Path, served: Checkpoint) -> None:
    write(tmp_path / "elsewhere", small(), "outside.safetensors")
    outside = tmp_path / "elsewhere" / "outside.safetensors"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link.safetensors").symlink_to(outside)
    refused = {
        str(outside): "is not a plain file name",
        "../elsewhere/outside.safetensors": "is not a plain file name",
        "..": "to no .safetensors file",
        "sub/one.safetensors": "is not a plain file name",
        "absent.safetensors": "absent.safetensors is missing",
        "link.safetensors": "link.safetensors is a link to a file outside the checkpoint",
        "\ud800\0.safetensors": "is not JSON",
        "a\0.safetensors": "is missing",
    }
    for name, message in refused.items():
        directory = write_shards(tmp_path / "links", {}, **dict.fromkeys(small(), name))
        with pytest.raises(CheckpointRefused, match=message) as refusal:
            check_checkpoint(served, directory)
        str(refusal.value).encode()


def test_links_of_a_served_checkpoint_are_followed(tmp_path: Path) -> None:
    blobs = write(tmp_path / "blobs", small(), "0a1b")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blobs / "0a1b")
    assert read_base_checkpoint(snapshot).tensors.keys() == small().keys()
    with pytest.raises(CheckpointRefused, match="link to a file outside the checkpoint"):
        read_checkpoint(snapshot)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither model.safetensors nor model.safetensors.index.json"),
        ({"model.safetensors.index.json": b"{"}, "is not JSON"),
        ({"model.safetensors.index.json": b"[" * 100_000}, "is not JSON"),
        ({"model.safetensors.index.json": b'{"weight_map": {"\\ud800": "a"}}'}, "is not JSON"),
        ({"model.safetensors.index.json": b"[]"}, "is not a JSON object"),
        ({"model.safetensors.index.json": b"{}"}, "has no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {}}'}, "has no tensors"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": 1}}'},
            "maps a to no .safetensors file",
        ),
        ({"model.safetensors.index.json": b"{}", "model.safetensors": b""}, "remove one of them"),
    ],
)
def test_directory_without_a_checkpoint_is_refused(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointRefused, match=message):
        read_checkpoint(tmp_path)


def test_shards_and_their_index_must_agree(tmp_path: Path) -> None:
    unnamed = write_shards(tmp_path / "unnamed", {"a.safetensors": small()})
    write(unnamed, small() | {"extra": np.zeros(1, np.float32)}, "a.safetensors")
    with pytest.raises(CheckpointRefused, match="index.json does not contain extra"):
        read_checkpoint(unnamed)
    absent = write_shards(tmp_path / "absent", {"a.safetensors": small()}, more="a.safetensors")
    with pytest.raises(CheckpointRefused, match="a.safetensors does not contain more"):
        read_checkpoint(absent)


def test_missing_or_unreadable_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match="does not exist"):
        read_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointRefused, match="cannot be read: File name too long"):
        read_checkpoint(tmp_path / ("x" * 300))


def test_file_truncated_after_indexing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "one", small()) / "model.safetensors"
    stored = read_checkpoint(path).tensors
    os.truncate(path, path.stat().st_size // 2)
    last = max(stored.values(), key=lambda tensor: tensor.end)
    with pytest.raises(CheckpointRefused, match="model.safetensors ends within model"):
        list(read_chunks(last))
    path.unlink()
    with pytest.raises(CheckpointRefused, match="model.safetensors cannot be read"):
        list(read_chunks(last))


@settings(deadline=None, max_examples=num_examples(300))
@given(data=st.data())
def test_corruption_never_changes_an_accepted_index(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """For any change of the bytes, the file is refused, or its index is unchanged."""
    intact = save(small(), metadata={"format": "pt"})
    path = tmp_path_factory.getbasetemp() / "corrupt.safetensors"
    path.write_bytes(intact)
    served = read_base_checkpoint(path)
    corrupt = bytearray(intact)
    header_end = 8 + int.from_bytes(intact[:8], "little")
    place = st.integers(0, header_end - 1) | st.integers(0, len(intact) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        at, size = data.draw(place), data.draw(st.integers(0, 5))
        corrupt[at : at + size] = data.draw(st.binary(max_size=6))
    path.write_bytes(corrupt)
    try:
        found = check_checkpoint(served, path)
    except CheckpointRefused:
        return
    assert found == served


@pytest.mark.slow
def test_gigabyte_is_checked_in_a_second(tmp_path: Path) -> None:
    """Half a gigabyte here, in the thread's CPU time, for busy machines."""
    values = np.full(2**26, 0x3C003C00, dtype=np.uint32).view(np.float32)
    path = write(tmp_path / "big", {NORM: values})
    served = read_base_checkpoint(path)
    seconds = []
    for _ in range(3):
        begun = time.thread_time()
        check_checkpoint(served, path)
        seconds.append(time.thread_time() - begun)
    assert values.nbytes / min(seconds) > 0.5e9
