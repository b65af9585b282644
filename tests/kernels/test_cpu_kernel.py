"""The compiled kernel against the reference in float64: each ISA, each dtype, any tree."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from kernels.shared_prefix_attention import cpu
from kernels.shared_prefix_attention.sharing_plan import SharingPlan
from tests.kernels import attention_reference
from tests.kernels.attention_reference import Step
from tests.kernels.decode_steps import HYDRAGEN, Levels, Shape, nothing_shared, rounded, step_of
from tests.kernels.packed_cache import packed, run_decode
from tests.kernels.tree_strategies import Drawn, random_values

pytestmark = pytest.mark.skipif(
    not cpu.is_built(), reason="the kernel was not built: no C++ compiler when it was installed"
)


def isas() -> list[cpu.Isa]:
    """ISAs of this processor: each includes all those before it."""
    best = cpu.best_isa()
    return [isa for isa in cpu.Isa if best is not None and isa <= best]


ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(isa not in isas(), reason=f"no {isa.name} here"))
    for isa in cpu.Isa
]
DTYPES = [torch.bfloat16, torch.float32]
TREE: Levels = [[70], [33, 64], [5, 200, 32, 1, 77, 31]]

# The largest error of any output. The largest outputs are between 4 and 8, where bfloat16 itself
# rounds by up to 2**-6 = 1.6e-2, and its probabilities are rounded as well.
CLOSE = {torch.bfloat16: 3e-2, torch.float32: 5e-6}
CLOSE_LSE = 5e-6


def close_lse(dtype: torch.dtype, isa: cpu.Isa) -> float:
    """Tolerance of the log-sum-exp.

    Where probabilities are bfloat16 too, the sums are of rounded values, by which the outputs are
    divided.
    """
    rounded_sums = dtype == torch.bfloat16 and isa == cpu.Isa.AVX512_BF16
    return 5e-3 if rounded_sums else CLOSE_LSE


def assert_right(
    plan: SharingPlan, step: Step, dtype: torch.dtype, isa: cpu.Isa, num_threads: int | None = None
) -> None:
    step = rounded(step, dtype)
    want, want_lse = attention_reference.full_attention(step)
    got = run_decode(plan, step, dtype, isa=isa, num_threads=num_threads)
    torch.testing.assert_close(got.out.double(), want, atol=CLOSE[dtype], rtol=0)
    torch.testing.assert_close(got.lse.double(), want_lse, atol=close_lse(dtype, isa), rtol=1e-6)


@pytest.mark.slow
def test_kernel_loads_no_openmp_runtime_of_its_own() -> None:
    """Threads of two runtimes would compete for the same processors."""
    script = (
        "import re, torch; torch.ones(10**6).sum(); "
        "maps = lambda: set(re.findall(r'/.*lib[gi]?omp.*', open('/proc/self/maps').read())); "
        "before = maps(); from kernels.shared_prefix_attention import cpu; assert cpu.is_built(); "
        "assert maps() == before, maps() - before; assert len(before) == 1, before"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("levels", HYDRAGEN, ids=str)
def test_hydragen_sizes(levels: Levels, dtype: torch.dtype, isa: cpu.Isa) -> None:
    assert_right(*step_of(levels, Shape(num_heads=8, num_kv_heads=1)), dtype, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", cpu.HEAD_SIZES)
def test_head_sizes(head_size: int, dtype: torch.dtype, isa: cpu.Isa) -> None:
    assert_right(*step_of(TREE, Shape(head_size=head_size)), dtype, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("query_tokens", [1, 5, 16])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 7, 16])
def test_ratios_of_query_heads_to_kv_heads(ratio: int, query_tokens: int, isa: cpu.Isa) -> None:
    levels: Levels = [[130], [query_tokens - 1 + extra for extra in (0, 1, 40)]]
    shape = Shape(num_heads=2 * ratio, num_kv_heads=2)
    assert_right(*step_of(levels, shape, query_tokens=query_tokens), torch.float32, isa)
    assert_right(*step_of(levels, shape, query_tokens=query_tokens), torch.bfloat16, isa)


@settings(deadline=None, max_examples=20)
@given(case=random_values())
def test_any_tree_equals_the_reference(case: Drawn) -> None:
    plan, step = step_of(case.levels, case.shape, query_tokens=case.query_tokens, seed=case.seed)
    for dtype in DTYPES:
        for isa in isas():
            assert_right(plan, step, dtype, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5, 64])
@pytest.mark.parametrize(
    "levels",
    [[[3000], [40, 40]], [[1000], [900, 1100], [2, 2000, 30, 5]], [[0], [3000, 10]]],
    ids=str,
)
def test_long_runs_are_split_among_threads(levels: Levels, num_threads: int, isa: cpu.Isa) -> None:
    plan, step = step_of(levels, Shape(num_heads=3, num_kv_heads=1), query_tokens=2)
    assert_right(plan, step, torch.bfloat16, isa, num_threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_shared_is_attention_row_by_row(dtype: torch.dtype, isa: cpu.Isa) -> None:
    _, step = step_of(TREE, Shape(), query_tokens=1)
    assert_right(nothing_shared(len(step.seq_lens)), step, dtype, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("levels", [TREE, [[0], [3000, 10]]], ids=str)
def test_sinks_are_added_once(
    levels: Levels, num_threads: int, dtype: torch.dtype, isa: cpu.Isa
) -> None:
    """From negligible ones to one that takes all weight."""
    plan, step = step_of(levels, Shape(num_heads=6), query_tokens=2)
    step = rounded(step, dtype)
    sinks = torch.tensor([-1e4, -3.0, 0.0, 2.0, 9.0, 300.0])
    out, lse = attention_reference.full_attention(step)
    sink = sinks.double().expand_as(lse)
    want, want_lse = attention_reference.merge(
        torch.stack([out, torch.zeros_like(out)]), torch.stack([lse, sink])
    )
    got = run_decode(plan, step, dtype, isa=isa, num_threads=num_threads, sinks=sinks)
    torch.testing.assert_close(got.out.double(), want, atol=CLOSE[dtype], rtol=0)
    torch.testing.assert_close(got.lse.double(), want_lse, atol=close_lse(dtype, isa), rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_many_rows_take_more_than_one_pass(isa: cpu.Isa) -> None:
    """The queries gathered by one unit are bounded: 32,768 floats."""
    levels: Levels = [[200], [3] * 20]
    plan, step = step_of(levels, Shape(num_heads=8, num_kv_heads=1, head_size=256))
    assert_right(plan, step, torch.float32, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("louder", ["prefix", "suffixes"])
def test_parts_with_very_different_sums(louder: str, dtype: torch.dtype, isa: cpu.Isa) -> None:
    """Log-sum-exps that differ by 50 and more, so that one part is negligible."""
    plan, step = step_of([[320], [1, 200]], Shape(), seed=3)
    split_attention = torch.isin(torch.arange(len(step.keys)), torch.from_numpy(plan.node_blocks))
    step.keys[split_attention if louder == "prefix" else ~split_attention] *= 20
    step = rounded(step, dtype)
    (_, prefix_lse), (_, suffix_lse) = attention_reference.partial_results(plan, step)[1]
    assert (prefix_lse - suffix_lse).abs().max() > 50
    want, want_lse = attention_reference.full_attention(step)
    got = run_decode(plan, step, dtype, isa=isa)
    torch.testing.assert_close(got.out.double(), want, atol=10 * CLOSE[dtype], rtol=0)
    torch.testing.assert_close(
        got.lse.double(), want_lse, atol=max(1e-4, close_lse(dtype, isa)), rtol=1e-6
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rise", [3, 20])
def test_steadily_increasing_scores(rise: int, dtype: torch.dtype, isa: cpu.Isa) -> None:
    """From tile to tile by less than the threshold that raises a row's maximum, and by more."""
    plan, step = step_of([[520], [1, 200]], Shape(), query_tokens=2, seed=4)
    step.query[..., 0] = 1 / step.scale
    for row, length in zip(step.block_table.long(), step.seq_lens.tolist(), strict=True):
        at = torch.arange(length)
        step.keys[row[at // 32], at % 32, :, 0] = (rise * (at // 128)).double()[:, None]
    step = rounded(step, dtype)
    want, want_lse = attention_reference.full_attention(step)
    got = run_decode(plan, step, dtype, isa=isa)
    torch.testing.assert_close(got.out.double(), want, atol=10 * CLOSE[dtype], rtol=0)
    torch.testing.assert_close(
        got.lse.double(), want_lse, atol=max(1e-4, close_lse(dtype, isa)), rtol=1e-6
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", [-500, -30, 30, 500])
def test_scores_far_from_zero(score: int, dtype: torch.dtype, isa: cpu.Isa) -> None:
    """Weights are relative to 1 until that is far from the maximum."""
    plan, step = step_of([[150], [1, 300]], Shape(), query_tokens=2, seed=5)
    step.query[..., 0], step.keys[..., 0] = 1 / step.scale, score
    step = rounded(step, dtype)
    want, want_lse = attention_reference.full_attention(step)
    got = run_decode(plan, step, dtype, isa=isa)
    torch.testing.assert_close(got.out.double(), want, atol=20 * CLOSE[dtype], rtol=0)
    torch.testing.assert_close(got.lse.double(), want_lse, atol=close_lse(dtype, isa), rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_row_without_tokens_is_zero(isa: cpu.Isa) -> None:
    plan, step = step_of([[0], [0, 40]], Shape())
    got = run_decode(plan, step, torch.float32, isa=isa)
    assert got.out[0].eq(0).all() and got.lse[0].isneginf().all()


@pytest.mark.parametrize("isa", ISAS)
def test_query_token_with_an_empty_context_is_zero(isa: cpu.Isa) -> None:
    """The first of three in a row of two: no engine requests it, and others must be unaffected."""
    plan, step = step_of([[0], [2, 40]], Shape(), query_tokens=3)
    got = run_decode(plan, step, torch.float32, isa=isa)
    assert got.out[0].eq(0).all() and got.lse[0].isneginf().all()
    assert_right(plan, step, torch.float32, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_query_affects_no_other_query(dtype: torch.dtype, isa: cpu.Isa) -> None:
    plan, step = step_of([[300], [1, 40, 7]], Shape())
    step = rounded(step, dtype)
    want, _ = attention_reference.full_attention(step)
    step.query[1] = torch.nan
    got = run_decode(plan, step, dtype, isa=isa).out.double()
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]], atol=CLOSE[dtype], rtol=0)
    assert got[1].isnan().all()


def test_slice_of_a_step_can_be_served_alone() -> None:
    """Mixed steps: the rows before it are served elsewhere, and their outputs are not written."""
    plan, step = step_of(TREE, Shape())
    want, _ = attention_reference.full_attention(step)
    query = step.query.float()
    out = torch.full_like(query, 7.0)
    decoding = cpu.DecodeStep(
        nothing_shared(2),
        block_table=step.block_table[2:4],
        seq_lens=step.seq_lens[2:4],
        query_start_loc=step.query_start_loc[2:5],
    )
    cache = packed(step.keys.float(), step.values.float())
    decoding.layer(query=query, cache=cache, scale=step.scale, out=out)
    torch.testing.assert_close(out[2:4].double(), want[2:4], atol=3e-6, rtol=0)
    assert out[:2].eq(7).all() and out[4:].eq(7).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"layout": "amx"}, cpu.UnsupportedReason.ISA),
        ({"dtype": torch.float16}, cpu.UnsupportedReason.DTYPE),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, cpu.UnsupportedReason.KV_CACHE_DTYPE),
        ({"head_size": 80}, cpu.UnsupportedReason.HEAD_SIZE),
        ({"head_size": 512}, cpu.UnsupportedReason.HEAD_SIZE),
        ({"block_size": 16}, cpu.UnsupportedReason.BLOCK_SIZE),
        ({"causal": False}, cpu.UnsupportedReason.NOT_CAUSAL),
        ({"soft_cap": True}, cpu.UnsupportedReason.SOFT_CAP),
        ({"alibi": True}, cpu.UnsupportedReason.ALIBI),
    ],
    ids=str,
)
def test_unsupported_configuration_has_a_reason(
    change: dict[str, object], reason: cpu.UnsupportedReason | None
) -> None:
    layer: dict[str, object] = {
        "dtype": torch.bfloat16,
        "kv_cache_dtype": torch.bfloat16,
        "layout": "vec",
        "head_size": 64,
        "block_size": 32,
    }
    assert cpu.unsupported_reason(**(layer | change)) == reason  # type: ignore[arg-type]
