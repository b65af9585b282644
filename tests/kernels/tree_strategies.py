"""Trees of rows that share prefixes, drawn by hypothesis."""

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.kernels.decode_steps import Levels, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    levels: Levels
    shape: Shape
    query_tokens: list[int]
    seed: int


@st.composite
def random_values(
    draw: st.DrawFn,
    *,
    head_sizes: tuple[int, ...] = (32, 64, 96),
    longest: int = 100,
    most_query_tokens: int = 16,
) -> Drawn:
    """Up to three levels of any lengths over rows with suffixes.

    Levels may be empty or end within a block. Suffixes range from a row's own query tokens to
    several blocks.
    """
    widths = draw(st.sampled_from([(1,), (2,), (3,), (1, 1), (1, 2), (2, 2), (3, 2), (2, 1, 2)]))
    block_size = draw(st.sampled_from([32, 64]))
    tokens = st.one_of(
        st.integers(0, longest), st.integers(0, longest // block_size).map(lambda n: n * block_size)
    )
    levels: list[list[int]] = []
    count = 1
    for width in widths:
        count *= width
        levels.append([draw(tokens) for _ in range(count)])
    num_rows = count * draw(st.integers(1, 3))
    query_tokens = [draw(st.sampled_from(range(1, most_query_tokens + 1))) for _ in range(num_rows)]
    # All query tokens of a row attend to a prefix, so the tokens after the first are in its suffix.
    levels.append([num - 1 + draw(tokens) for num in query_tokens])
    num_kv_heads = draw(st.integers(1, 2))
    return Drawn(
        levels=levels,
        shape=Shape(
            num_heads=num_kv_heads * draw(st.integers(1, 6)),
            num_kv_heads=num_kv_heads,
            head_size=draw(st.sampled_from(head_sizes)),
            block_size=block_size,
        ),
        query_tokens=query_tokens,
        seed=draw(st.integers(0, 2**16)),
    )
