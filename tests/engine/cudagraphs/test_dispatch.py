"""Selection of the graph for a step: by a ladder per length, and as in vLLM 0.32."""

from engine.cudagraphs.plan_score import (
    RIDGE_TOKENS,
    GraphMemory,
    PerLengthLookup,
    VllmLookup,
    score,
)
from engine.cudagraphs.shapes import UNEVEN, GraphShape, decode, mixed

SHAPES = [decode(2, 1), decode(4, 1), decode(2, 3), mixed(8), mixed(4)]


def test_ladder_finds_the_next_larger_graph_of_the_same_length() -> None:
    ladder = PerLengthLookup(SHAPES)
    assert ladder.find(decode(1, 1)) == decode(2, 1)
    assert ladder.find(decode(3, 1)) == decode(4, 1)
    assert ladder.find(decode(5, 1)) is None
    assert ladder.find(decode(1, 3)) == decode(2, 3)
    assert ladder.find(decode(1, 2)) is None
    assert ladder.find(mixed(5)) == mixed(8)
    assert ladder.find(GraphShape(3, UNEVEN)) is None


def test_vllm_looks_no_further_than_the_next_number_of_tokens() -> None:
    looked = VllmLookup(SHAPES)
    assert looked.find(decode(3, 1)) == decode(4, 1)
    assert looked.find(decode(1, 3)) is None  # a graph of 4 tokens comes first, with another length
    assert looked.find(decode(2, 3)) == decode(2, 3)
    assert looked.find(mixed(5)) == mixed(8)


def test_hits_count_decode_steps_and_padding_is_weighted_by_time() -> None:
    memory = GraphMemory(graph_bytes=100, token_bytes=10)
    asked = {decode(3, 1): 30.0, decode(9, 1): 10.0, mixed(3): 5.0}
    judged = score(SHAPES, PerLengthLookup(SHAPES), asked, memory)
    assert judged.hit_rate == 0.75
    assert judged.padding == (RIDGE_TOKENS + 4) / (RIDGE_TOKENS + 3) - 1
    assert judged.total_bytes == 5 * 100 + 8 * 10
