import pickle

import pytest

from coppice.rollout_results import result_of, sample_of
from tests.client.answers import ANSWER, sample


def test_every_token_has_a_version() -> None:
    assert sample_of(sample(0)).token_versions() == ["v1", "v2", "v2"]


def test_result_survives_pickling() -> None:
    result = pickle.loads(pickle.dumps(result_of(ANSWER)))
    assert result.groups[0].samples[1].token_ids.tolist() == [5, 6, 8]


def test_arrays_become_tensors_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    made = sample_of(sample(0))
    torch.from_numpy(made.logprobs)[0] = 1.0
    assert made.logprobs[0] == 1.0


def test_groups_and_samples_are_in_order() -> None:
    groups = [
        group.model_copy(update={"samples": group.samples[::-1]}) for group in ANSWER.groups[::-1]
    ]
    result = result_of(ANSWER.model_copy(update={"groups": groups}))
    assert [group.index for group in result.groups] == [0, 1]
    assert [made.index for made in result.groups[0].samples] == [0, 1]
