"""Fuzzing of every parser of untrusted bytes.

Each parser may raise its own error and nothing else. Request bodies are fuzzed through the whole
app (tests/service/test_schemathesis.py, tests/soak/malformed.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from coppice.errors import BadAnswer
from coppice.operations.record_stream import NdjsonReader
from coppice.wire.packed.results import EndRecord, StartRecord, pack, unpack
from coppice.wire.rollouts import RolloutAnswer
from engine.errors import CheckpointRefused
from engine.weights.checkpoint import read_checkpoint
from service.auth.access import key_from_headers
from service.auth.keys import read_keys
from service.config.sources import SettingsError
from tests.sample_sizes import num_examples

pytestmark = pytest.mark.slow

quick = settings(
    deadline=None,
    max_examples=num_examples(100),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=8), below, max_size=4)
    ),
    max_leaves=12,
)
NUMBER = st.integers(-2, 40) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63)])
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I64", "F8_E4M3", "BOOL", "nothing"])
        | JSON,
        "shape": st.lists(NUMBER, max_size=4) | JSON,
        "data_offsets": st.lists(NUMBER, max_size=3) | JSON,
        "more": JSON,
    },
)
HEADER = st.dictionaries(st.text(max_size=12) | st.just("__metadata__"), TENSOR | JSON, max_size=4)
RECORD = StartRecord(id="x").model_dump_json().encode()
ANSWER: dict[str, Any] = {
    "id": "r",
    "outcome": "done",
    "groups": [],
    "usage": {"num_prompt_tokens": 0, "num_generated_tokens": 0, "num_samples": 0},
}
PACKED = pack(RolloutAnswer.model_validate(ANSWER))


def file_of(header: bytes, body: bytes, length: int | None = None) -> bytes:
    announced = len(header) if length is None else length
    return announced.to_bytes(8, "little") + header + body


@quick
@given(header=HEADER, body=st.binary(max_size=64))
def test_checkpoint_with_random_header_is_refused_or_within_its_file(
    tmp_path: Path, header: dict[str, Any], body: bytes
) -> None:
    path = tmp_path / "model.safetensors"
    content = file_of(json.dumps(header).encode(), body)
    path.write_bytes(content)
    try:
        tensors = read_checkpoint(path).tensors
    except CheckpointRefused:
        return
    for tensor in tensors.values():
        assert 0 <= tensor.start <= tensor.end <= len(content)


@quick
@given(
    header=st.binary(max_size=64),
    length=NUMBER.filter(lambda n: 0 <= n < 2**64),
    body=st.binary(max_size=16),
)
@example(header=b"[" * 64, length=64, body=b"")
def test_checkpoint_of_random_bytes_is_refused(
    tmp_path: Path, header: bytes, length: int, body: bytes
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header, body, length))
    with pytest.raises(CheckpointRefused):
        read_checkpoint(path)


@quick
@given(index=JSON)
def test_shard_index_of_random_json_is_refused(tmp_path: Path, index: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointRefused):
        read_checkpoint(tmp_path)


@quick
@given(chunks=st.lists(st.binary(max_size=40) | st.just(RECORD) | st.just(b"\n"), max_size=12))
def test_stream_of_random_bytes_yields_records_or_bad_answer(chunks: list[bytes]) -> None:
    reader = NdjsonReader()
    try:
        records = [record for chunk in chunks for record in reader.feed(chunk)]
    except BadAnswer:
        return
    assert reader.ended is any(isinstance(record, EndRecord) for record in records)


@quick
@given(line=JSON)
def test_line_of_random_json_is_a_record_or_a_bad_answer(line: Any) -> None:
    try:
        list(NdjsonReader().feed(json.dumps(line).encode() + b"\n"))
    except BadAnswer:
        return


@quick
@given(place=st.integers(0, len(PACKED) - 1), byte=st.integers(0, 255))
def test_packed_answer_with_one_byte_changed_is_valid_or_refused(place: int, byte: int) -> None:
    try:
        packed = unpack(PACKED[:place] + bytes([byte]) + PACKED[place + 1 :])
    except ValueError:
        return
    assert isinstance(packed.answer, RolloutAnswer)


@quick
@given(header=HEADER, body=st.binary(max_size=64))
def test_packed_answer_with_random_header_is_refused(header: dict[str, Any], body: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(file_of(json.dumps(header).encode(), body))


@quick
@given(st.text(alphabet=st.characters(max_codepoint=255), max_size=60))
@example("Basic " + "=" * 9)
@example("Basic /////w==")
def test_random_credentials_are_a_key_or_none(value: str) -> None:
    for scheme in ("", "Bearer ", "Basic "):
        key = key_from_headers(
            Headers(raw=[(b"authorization", (scheme + value).encode("latin-1"))])
        )
        assert key is None or isinstance(key, str)


@quick
@given(st.binary(max_size=80) | JSON.map(lambda tree: json.dumps(tree).encode()))
def test_key_file_of_random_bytes_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(content)
    with pytest.raises(SettingsError):
        read_keys(file)
