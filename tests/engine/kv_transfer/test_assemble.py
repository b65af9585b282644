"""KV assembled from exports in a file equals a reference computation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.worker.loader import SpanAssembler
from engine.kv_transfer.worker.mapped_arena import Arenas
from engine.types.kv import ExportSlot, LoadPiece, ObservedKv
from kernels.rope_shift import RotaryParams, parse_rotary
from kernels.span_kv_prediction import Observation
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import kv_format
from tests.kernels.kv_predict_reference import slow_predict, slow_weights

LAYERS, HEADS, HEAD_DIM, NUM_TOKENS = 3, 2, 16, 12
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10_000.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


class RandomExports:
    """Random exports of one length, and their contents."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        kv_form = kv_format(HEADS, num_layers=LAYERS, head_dim=HEAD_DIM, dtype=name)
        self._arena, self._dtype = TestArena(path, kv_form, num_bytes=2**18), dtype
        self.layout = CacheLayout(
            group=0,
            layers=tuple(map(str, range(LAYERS))),
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            dtype=dtype,
            block_size=16,
            num_ranks=1,
        )
        self.values: dict[ExportSlot, torch.Tensor] = {}

    def slot(self, *, like: ExportSlot | None = None) -> ExportSlot:
        """An export of random values, or of values close to `like`.

        The distance between close exports varies per token instead of being zero or total.
        """
        generator = torch.Generator().manual_seed(len(self.values))
        shape = (LAYERS, 2, HEADS, NUM_TOKENS, HEAD_DIM)
        values = torch.randn(shape, generator=generator)
        if like is not None:
            values = self.values[like].float() + 0.1 * values
        slot = self._arena.slot(NUM_TOKENS)
        self.values[slot] = values.to(self._dtype)
        end = slot.offset + self._arena.num_bytes(NUM_TOKENS)
        self._arena.bytes[slot.offset : end] = self.values[slot].view(torch.uint8).flatten()
        return slot

    def kv(self, slot: ExportSlot, token_offset: int, num_tokens: int) -> torch.Tensor:
        return self.values[slot][:, :, :, token_offset : token_offset + num_tokens].float()


def assemble(exports: RandomExports, run: list[LoadPiece], rotary: RotaryParams) -> torch.Tensor:
    arenas = Arenas(exports.layout)
    assembled = SpanAssembler(exports.layout, arenas, range(HEADS)).assemble(run, rotary)
    arenas.close()
    return assembled


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def exports(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RandomExports]:
    yield RandomExports(tmp_path / "arena", request.param)


@pytest.fixture(params=ROPES)
def rotary(request: pytest.FixtureRequest) -> RotaryParams:
    return parse_rotary(ROPES[request.param], HEAD_DIM)


@pytest.fixture
def run(exports: RandomExports) -> list[LoadPiece]:
    """Spliced pieces, pieces predicted with base values, and pieces predicted without bases."""
    source = exports.slot()
    bases = [exports.slot(like=source) for _ in range(3)]
    with_bases = tuple(
        ObservedKv(
            real=exports.slot(),
            token_offset=3,
            shift=5 - i,
            base=base,
            base_token_offset=1,
            weight=1.0,
        )
        for i, base in enumerate(bases)
    )
    without_bases = tuple(
        ObservedKv(
            real=exports.slot(),
            token_offset=i,
            shift=2 * i,
            base=None,
            base_token_offset=0,
            weight=weight,
        )
        for i, weight in enumerate((0.7, 0.3))
    )
    spliced = LoadPiece(source=exports.slot(), token_offset=4, num_tokens=5, start=32, shift=28)
    return [
        spliced,
        LoadPiece(
            source=source, token_offset=1, num_tokens=9, start=37, shift=36, observations=with_bases
        ),
        LoadPiece(
            source=without_bases[0].real,
            token_offset=0,
            num_tokens=4,
            start=46,
            shift=0,
            observations=without_bases,
        ),
    ]


@pytest.fixture
def other_default() -> Iterator[None]:
    """A different default dtype, as while vLLM loads a model."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(usual)


def expected_kv(exports: RandomExports, piece: LoadPiece, rotary: RotaryParams) -> torch.Tensor:
    num = piece.num_tokens
    source = exports.kv(piece.source, piece.token_offset, num)
    bases = [
        None
        if observed.base is None
        else exports.kv(observed.base, observed.base_token_offset, num)
        for observed in piece.observations
    ]
    present = [base for base in bases if base is not None]
    shares = torch.tensor([observed.weight for observed in piece.observations])
    constant = shares[:, None, None].expand(-1, 2, num)
    weights_of = slow_weights(source, present) if present else constant
    observations = [
        Observation(
            real=exports.kv(observed.real, observed.token_offset, num),
            shift=observed.shift,
            base=base,
            weights=weights,
        )
        for observed, base, weights in zip(piece.observations, bases, weights_of, strict=True)
    ]
    return slow_predict(source, piece.shift, observations, rotary)


def test_run_equals_the_reference(
    exports: RandomExports, rotary: RotaryParams, run: list[LoadPiece]
) -> None:
    assembled = assemble(exports, run, rotary)
    expected = torch.cat([expected_kv(exports, piece, rotary) for piece in run], dim=3)
    assert assembled.dtype == exports.layout.dtype
    bound = 1e-5 if assembled.dtype == torch.float32 else 2**-5
    assert (assembled - expected).abs().max() < bound


def test_run_is_computed_in_float32_whatever_the_default_dtype(
    exports: RandomExports, run: list[LoadPiece], other_default: None
) -> None:
    rotary = parse_rotary(ROPES["default"], HEAD_DIM)
    assembled = assemble(exports, run, rotary)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(assembled, assemble(exports, run, rotary))
