"""The tests of numpy arrays repeated with torch tensors, where torch is installed."""

import numpy as np
import pytest

from coppice.weights.tensor_serialization import StateDict, tensors_of

torch = pytest.importorskip("torch")


def names(state: StateDict) -> list[str]:
    return [tensor.name for tensor in tensors_of(state)]


def test_first_of_tied_tensors_is_sent() -> None:
    embedding = torch.nn.Parameter(torch.ones(4, 2))
    assert names({"embed": embedding, "lm_head": embedding.data}) == ["embed"]


def test_array_sharing_memory_with_a_tensor_is_sent_separately() -> None:
    tensor = torch.ones(2)
    assert names({"a": tensor, "b": tensor.numpy()}) == ["a", "b"]


def test_equal_tensors_in_different_memory_are_both_sent() -> None:
    assert names({"a": torch.ones(2), "b": torch.ones(2)}) == ["a", "b"]


def test_views_of_one_storage_are_sent() -> None:
    fused = torch.arange(6.0)
    assert names({"q": fused[:3], "k": fused[3:], "all": fused}) == ["q", "k", "all"]


def test_transposed_view_of_the_same_memory_is_sent() -> None:
    square = torch.ones(2, 2)
    assert names({"w": square, "w_t": square.T}) == ["w", "w_t"]


def test_empty_tensors_are_all_sent() -> None:
    assert names({"a": torch.zeros(0), "b": torch.zeros(0)}) == ["a", "b"]


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"^w has dtype complex128"):
        tensors_of({"w": torch.zeros(2, dtype=torch.complex128)})


def test_tensor_without_data_is_refused_by_torch() -> None:
    (tensor,) = tensors_of({"w": torch.zeros(2, device="meta")})
    with pytest.raises(NotImplementedError, match="meta"):
        tensor.load()


def test_every_bit_of_a_bfloat16_is_preserved() -> None:
    tensor = torch.tensor([1.0, -2.5, float("inf")], dtype=torch.bfloat16)
    (described,) = tensors_of({"w": tensor})
    assert (described.dtype, described.shape, described.num_bytes) == ("BF16", (3,), 6)
    assert described.load().view(np.uint16).tolist() == [0x3F80, 0xC020, 0x7F80]
