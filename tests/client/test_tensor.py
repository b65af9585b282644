from typing import Any

import numpy as np
import pytest

from coppice.weights.tensor_serialization import StateDict, tensors_of


def names(state: StateDict) -> list[str]:
    return [tensor.name for tensor in tensors_of(state)]


def test_first_of_tied_arrays_is_sent() -> None:
    embedding = np.ones((4, 2), dtype=np.float32)
    assert names({"embed": embedding, "lm_head": embedding[:]}) == ["embed"]


def test_equal_arrays_in_different_memory_are_both_sent() -> None:
    assert names({"a": np.ones(2), "b": np.ones(2)}) == ["a", "b"]


def test_parts_of_one_array_are_sent() -> None:
    fused = np.arange(6.0)
    assert names({"q": fused[:3], "k": fused[3:], "all": fused}) == ["q", "k", "all"]


def test_views_with_another_order_or_dtype_are_sent() -> None:
    square = np.ones((2, 2))
    state = {"w": square, "w_t": square.T, "bits": square.view(np.int64)}
    assert names(state) == ["w", "w_t", "bits"]


def test_empty_arrays_are_all_sent() -> None:
    empty = np.zeros(0, dtype=np.float32)
    assert names({"a": empty, "b": empty}) == ["a", "b"]


@pytest.mark.parametrize("value", [[1.0, 2.0], None, "text"])
def test_value_that_is_not_a_tensor_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"layer\.extra is "):
        tensors_of({"layer.extra": value})


@pytest.mark.parametrize("dtype", ["U1", object, "complex128", "datetime64[s]"])
def test_unsupported_dtype_is_named(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"^w has dtype "):
        tensors_of({"w": np.zeros(1, dtype=dtype)})


def test_foreign_byte_order_is_refused() -> None:
    with pytest.raises(ValueError, match="w does not have native byte order"):
        tensors_of({"w": np.ones(2, dtype=np.dtype(np.float32).newbyteorder())})


def test_shard_of_a_distributed_tensor_is_refused() -> None:
    class Shard:
        def full_tensor(self) -> None: ...

    with pytest.raises(ValueError, match="w is sharded over processes"):
        tensors_of({"w": Shard()})


def test_empty_state_dict_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        tensors_of({})
