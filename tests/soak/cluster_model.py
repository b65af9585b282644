"""The models of a cluster under faults: their start, and their expected tokens."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load, save

from tests.engine.greedy import TIE, logit_gap_to_greedy
from tests.engine.seedling import MODEL, reference
from tests.fake_engine import VOCAB_SIZE


class TokenReport(NamedTuple):
    """Tokens returned for a prompt, with the version on their label."""

    version: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class FleetModel(Protocol):
    """`module` is run with `serve`. `weights` returns those of a version, by its number."""

    name: str
    module: str
    vocabulary: range
    num_callers: int
    start_seconds: float

    def settings(self, index: int) -> Mapping[str, str]: ...

    def weights(self, number: int) -> bytes: ...

    def find_wrong(self, reports: Collection[TokenReport]) -> Sequence[TokenReport]: ...

    def summary(self, reports: Collection[TokenReport]) -> str:
        """A one-sentence summary of the check."""
        ...


class CountingModel:
    """The fake engine: token i is the prompt's length plus i, for any version."""

    name = "fake"
    module = "tests.soak.paced_engine"
    vocabulary = range(VOCAB_SIZE)
    num_callers = 12
    start_seconds = 60.0

    def settings(self, index: int) -> Mapping[str, str]:
        return {}

    def weights(self, number: int) -> bytes:
        return f"weights {number}".encode()

    def find_wrong(self, reports: Collection[TokenReport]) -> Sequence[TokenReport]:
        return [
            one
            for one in reports
            if list(one.tokens) != [(len(one.prompt) + i) % VOCAB_SIZE for i in range(len(one[2]))]
        ]

    def summary(self, reports: Collection[TokenReport]) -> str:
        return (
            f"{len(reports):,} different answers were compared with the tokens of the fake engine."
        )


class SeedlingModel:
    """The shipped model in float32, with a different perturbation per version.

    Small and with one thread per rank, so that three of them fit; the last replica has two ranks.
    """

    name = "real"
    module = "service"
    vocabulary = range(4, 269)
    num_callers = 6
    start_seconds = 300.0

    def settings(self, index: int) -> Mapping[str, str]:
        ranks = {"ENGINE__TENSOR_PARALLEL_SIZE": "2"} if index == 2 else {}
        return ranks | {
            "ENGINE__DTYPE": "float32",
            "ENGINE__PROMPT_KV": "true",
            "ENGINE__CPU_THREADS": "1",
            "ENGINE__CACHE_BYTES": str(2**26),
            "ENGINE__MAX_CONTEXT_TOKENS": "256",
            "ENGINE__MAX_SEQUENCES": "64",
            "ENGINE__STEP_SECONDS": "4",
        }

    def weights(self, number: int) -> bytes:
        return _weights(number)

    def find_wrong(self, reports: Collection[TokenReport]) -> Sequence[TokenReport]:
        return [one for one in reports if not self._chooses(one.version, one)]

    def summary(self, reports: Collection[TokenReport]) -> str:
        """Summarizes the check.

        As a control, asserts that nearly all tokens would be wrong for the previous version.
        """
        later = [one for one in reports if one.version]
        strange = sum(not self._chooses(one.version - 1, one) for one in later)
        assert strange > 0.9 * len(later), f"{strange} of {len(later)}"
        return (
            f"{len(reports):,} different answers were compared with greedy decoding in Hugging "
            f"Face transformers, with the weights of the version that labels the answer. With the "
            f"weights of the previous version, {strange:,} of {len(later):,} answers would differ."
        )

    def _chooses(self, number: int, one: TokenReport) -> bool:
        behind = logit_gap_to_greedy(_reference(number), one.prompt, one.tokens)
        return bool(behind.max() <= TIE)


@cache
def _weights(number: int) -> bytes:
    shipped = (MODEL / "model.safetensors").read_bytes()
    if not number:
        return shipped
    draw = torch.Generator().manual_seed(number)
    disturbed = {
        name: values + 0.2 * values.std() * torch.randn(values.shape, generator=draw)
        for name, values in load(shipped).items()
    }
    saved: bytes = save({name: values.bfloat16() for name, values in disturbed.items()})
    return saved


@cache
def _reference(number: int) -> Any:
    model = reference()
    tensors = {name: values.float() for name, values in load(_weights(number)).items()}
    model.load_state_dict(tensors, strict=False)  # the head is tied
    return model
