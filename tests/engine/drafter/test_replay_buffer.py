"""The drafter's training data: the newest samples, and long ones of earlier versions."""

from engine.drafter.trainer.messages import Sample
from engine.drafter.trainer.replay_buffer import ReplayBuffer


def sample_of(version: str, length: int) -> Sample:
    return Sample(version=version, prompt=[1, 2], response=[7] * length)


def test_newest_samples_evict_the_oldest() -> None:
    buffer = ReplayBuffer(max_recent_tokens=100, max_long_tokens=0)
    for length in range(1, 40):
        buffer.add(sample_of("v0", length))
    drawn = {len(buffer.draw().response) for _ in range(200)}
    assert max(drawn) == 39
    assert min(drawn) > 35


def test_long_responses_of_earlier_versions_are_retained() -> None:
    buffer = ReplayBuffer(max_recent_tokens=1000, max_long_tokens=120)
    for length in (5, 40, 6, 30, 7):
        buffer.add(sample_of("v0", length))
    for _ in range(20):
        buffer.add(sample_of("v1", 3))
    drawn = [buffer.draw() for _ in range(500)]
    earlier = [sample for sample in drawn if sample.version == "v0"]
    assert {len(sample.response) for sample in earlier} == {40, 7, 6}
    assert 0.1 < len(earlier) / len(drawn) < 0.3


def test_earlier_versions_share_the_capacity() -> None:
    buffer = ReplayBuffer(max_recent_tokens=1000, max_long_tokens=100)
    for version in ("v0", "v1", "v2"):
        for _ in range(10):
            buffer.add(sample_of(version, 18))
    buffer.add(sample_of("v3", 1))
    earlier = {buffer.draw().version for _ in range(500)} - {"v3"}
    assert {"v1", "v2"} <= earlier


def test_empty_response_is_not_stored() -> None:
    buffer = ReplayBuffer()
    buffer.add(sample_of("v0", 0))
    assert len(buffer) == buffer.num_received == 0
