"""Sampling every position and comparing equals vLLM's rejection sampler, at a lower cost."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from engine.launch.plugin import install_patches
from engine.speculation.draft_verification import DraftVerifier
from tests.engine.speculation.distributions import (
    VOCAB,
    Setting,
    chi_square,
    p_value,
    two_sample_chi_square,
)
from tests.sample_sizes import TIMES

pytestmark = pytest.mark.engine

ALIKE = int(20_000 * TIMES)
MIN_P_VALUE = 1e-6
CUT = Setting(temperature=0.7, top_p=0.9, top_k=20)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """vLLM's kernels for CPUs, registered as a worker does."""
    install_patches("EngineCore")
    current_platform.register_triton_kernel_overrides()


def metadata(drafts: list[list[int]]) -> SpecDecodeMetadata:
    """Metadata as the runner makes it, for requests that all decode."""
    made = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    ends = np.cumsum([1 + len(draft) for draft in drafts])
    target = [i for i in range(ends[-1]) if i + 1 not in set(ends)]
    made.target_logits_indices = torch.tensor(target, dtype=torch.int64)
    made.bonus_logits_indices = torch.from_numpy(ends - 1)
    return made


def sampling(
    rows: int,
    setting: Setting,
    *,
    generators: dict[int, torch.Generator] | None = None,
    logprobs: int | None = None,
) -> SamplingMetadata:
    greedy, cut = setting.temperature == 0, setting.top_k > 0
    nothing = torch.zeros(rows)
    return SamplingMetadata(
        temperature=None if greedy else torch.full((rows,), setting.temperature),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=torch.full((rows,), setting.top_p) if cut else None,
        top_k=torch.full((rows,), setting.top_k, dtype=torch.int32) if cut else None,
        generators=generators or {},
        max_num_logprobs=logprobs,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@dataclass(frozen=True)
class VerifierPair:
    """A verifying sampler, and vLLM's own."""

    ours: DraftVerifier
    theirs: RejectionSampler

    @classmethod
    def of(cls) -> "VerifierPair":
        theirs = RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))
        return cls(DraftVerifier(theirs), theirs)


def test_greedy_drafts_and_logprobs_equal_those_of_vllm() -> None:
    chance, both = torch.Generator().manual_seed(3), VerifierPair.of()
    drafts = [[4, 5, 6], [], [7], [1, 2], [9, 9, 9, 9]]
    of = metadata(drafts)
    logits = torch.randn(len(of.logits_indices), VOCAB, generator=chance)
    for place, token in ((0, 4), (1, 5), (4, 3), (5, 7), (7, 1), (8, 3), (10, 9)):
        logits[place, token] = 20.0
    greedy = sampling(len(drafts), Setting(temperature=0), logprobs=0)
    one, other = (verify(of, None, logits.clone(), greedy) for verify in (both.ours, both.theirs))
    assert one.sampled_token_ids.tolist() == other.sampled_token_ids.tolist()
    assert (one.sampled_token_ids >= 0).sum(1).tolist() == [3, 1, 2, 2, 2]
    emitted = one.sampled_token_ids.flatten() >= 0
    for ours, theirs in zip(one.logprobs_tensors[:3], other.logprobs_tensors[:3], strict=True):
        torch.testing.assert_close(ours[emitted], theirs[emitted])


@pytest.mark.parametrize("setting", [Setting(), CUT], ids=["plain", "truncated"])
def test_distribution_at_every_position_equals_that_of_vllm(setting: Setting) -> None:
    torch.manual_seed(5)
    of = metadata([[3, 4]] * ALIKE)
    logits = torch.randn(3, VOCAB) * 2
    logits[0, 3] = logits[1, 4] = logits.max() + 0.5
    laws = setting.distribution(logits.double().numpy())
    seen = []
    for verify in (VerifierPair.of().ours, VerifierPair.of().theirs):
        came = verify(of, None, logits.repeat(ALIKE, 1), sampling(ALIKE, setting))
        tokens = came.sampled_token_ids.numpy()
        seen.append([np.bincount(t[t >= 0], minlength=VOCAB) for t in tokens.T])
    for distribution, one, other in zip(laws, *seen, strict=True):
        assert one.sum() > ALIKE / 10
        assert p_value(chi_square(one, distribution)) > MIN_P_VALUE
        assert p_value(two_sample_chi_square(one, other)) > MIN_P_VALUE


def test_step_without_drafts_uses_the_plain_sampler() -> None:
    both, of = VerifierPair.of(), metadata([[], [], []])
    came = both.ours(of, None, torch.eye(VOCAB)[:3] * 50, sampling(3, Setting()))
    assert came.sampled_token_ids.tolist() == [[0], [1], [2]]


def test_seeded_request_draws_from_its_own_stream() -> None:
    torch.manual_seed(7)
    logits = torch.randn(6, VOCAB)

    def fifth(drafts: list[list[int]], rows: torch.Tensor) -> Any:
        streams = {len(drafts) - 1: torch.Generator().manual_seed(11)}
        asked = sampling(len(drafts), Setting(), generators=streams)
        return (
            VerifierPair.of()
            .ours(metadata(drafts), None, rows.clone(), asked)
            .sampled_token_ids[-1, 0]
        )

    for _ in range(5):
        assert fifth([[1, 2], [3], []], logits) == fifth([[]], logits[-1:])


@pytest.mark.parametrize("asked", ["penalties", "bad_words", "min_tokens"])
def test_parameters_that_depend_on_earlier_tokens_are_left_to_vllm(asked: str) -> None:
    calls: list[int] = []

    class Theirs:
        sampler = Sampler()

        def __call__(self, *_: Any) -> str:
            calls.append(1)
            return "theirs"

    class MinTokens:
        min_toks: ClassVar[dict[int, Any]] = {0: (4, [], {1}, False)}

        def is_argmax_invariant(self) -> bool:
            return False

    params = sampling(1, Setting())
    if asked == "penalties":
        params.no_penalties = False
    elif asked == "bad_words":
        params.bad_words_token_ids = {0: [[4]]}
    else:
        params.logitsprocs = LogitsProcessors([MinTokens()])
    assert DraftVerifier(Theirs())(metadata([[3]]), None, torch.zeros(2, VOCAB), params) == "theirs"
    assert calls == [1]
