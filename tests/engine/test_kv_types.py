"""Transfer parameters of a request survive the message to EngineCore."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.types.kv import ExportSlot, KvLoad, KvTransferParams, LoadPiece, ObservedKv

SLOT = ExportSlot(
    arena=Path("/dev/shm/arena"), offset=64, status_offset=0, num_tokens=100, name="a"
)
OBSERVED = ObservedKv(real=SLOT, token_offset=3, shift=-5, base=replace(SLOT, name=None))
LOAD = KvLoad(
    chain="chain",
    num_requests=2,
    exact_tokens=32,
    pieces=(
        LoadPiece(source=SLOT, token_offset=0, num_tokens=20, start=32, shift=32),
        LoadPiece(
            source=SLOT,
            token_offset=1,
            num_tokens=9,
            start=52,
            shift=51,
            observations=(OBSERVED, replace(OBSERVED, base=None, weight=0.25)),
        ),
    ),
)


@pytest.mark.parametrize(
    "params",
    [
        KvTransferParams(),
        KvTransferParams(export=SLOT),
        KvTransferParams(load=LOAD),
        KvTransferParams(export=replace(SLOT, name=None), load=LOAD),
    ],
)
def test_params_are_equal_after_a_round_trip_through_msgpack(params: KvTransferParams) -> None:
    sent = msgspec.msgpack.encode(params.to_dict())
    assert KvTransferParams.from_dict(msgspec.msgpack.decode(sent)) == params


def test_request_without_transfers_has_no_params() -> None:
    assert KvTransferParams.from_dict(None) == KvTransferParams()
