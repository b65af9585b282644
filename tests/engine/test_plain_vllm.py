"""Sampling controls against plain vLLM: greedy samples, and distributions above temperature 0.

Samples share their prompts in groups, branch from earlier samples and verify drafts. The reference
is the same version of vLLM in another process without any hook, plugin or draft.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from engine.attention import register as attention
from engine.attention.counters import COUNTERS as ATTENTION
from engine.attention.settings import AttentionSettings
from engine.requests import stop_strings
from engine.requests.request_params import sampling_params
from engine.sampling import request_hooks
from engine.speculation.counters import COUNTERS as SPECULATION
from engine.types.samples import SampleRequest, Sampling, StructuredOutputs
from tests.engine.attention.shared_engine import unregister
from tests.engine.plain_vllm import PlainRequest, PlainSample, plain_samples
from tests.engine.seedling import MODEL
from tests.engine.speculation.distributions import p_value, two_sample_chi_square
from tests.engine.speculation.drafting_engine import drafting_engine
from tests.engine.stepped_engine import Answer, LiveEngine, live_engine

# Imports of vLLM and its draft methods emit unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPT = "Compute 1+2.\n3\nCompute 30+4.\n34\nCompute 5*6.\n30\nCompute 12+34.\n"
NUM_GREEDY_TOKENS = 20
NUM_TOKENS = 6
NUM_PLAIN, NUM_OURS = 800, 400
TEMPERATURE = 1.5
CELL = 60
"""Number of samples in both sets from which on those that begin alike are told apart further."""
BAD_WORDS = ["4", "=4", "an"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 30, "x"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CONTROLS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "logit_bias": {"logit_bias": {"20": 4.0, "21": -2.0, "30": 3.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(15, 40))},
    "bad_words": {"bad_words": BAD_WORDS},
    "min_tokens": {"min_tokens": 4, "ignore_eos": False},
    "stop": {"stop": ["4", "12"], "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": [20, 22], "min_tokens": 2},
    "json": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "regex": {"structured_outputs": {"regex": "[a-c]{2,4}[0-9]{2,6}x?"}},
    "choice": {
        "structured_outputs": {
            "choice": ["46", "4 + 6", "answer: 46", "answer: 34", "answer: 4 + 6"]
        }
    },
    "grammar": {"structured_outputs": {"grammar": 'root ::= "(" root ")" | [0-9] root | "."'}},
    "all": {
        "top_k": 12,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "allowed_token_ids": list(range(10, 60)),
        "bad_words": BAD_WORDS,
        "structured_outputs": {"regex": "[0-9a-f]{3,9}"},
    },
}
WITHOUT_DRAFTS = {"min_p", "logit_bias", "min_tokens", "stop_token_ids"}
WEAK = {"none", "min_tokens", "presence_penalty", "frequency_penalty", "bad_words"}
"""Controls that change too little in so few tokens to be detected by the distribution alone."""
KINDS = ("group", "tree", "drafts", "tree of drafts")
MIN_P_VALUE = 1e-4 / (10 * len(CONTROLS) * len(KINDS))
"""The chi-square approximation may be off by a factor of 10 at such probabilities."""
IDS = itertools.count()
every_control = pytest.mark.parametrize("control", CONTROLS)
every_kind = pytest.mark.parametrize("kind", KINDS)
Samples = Sequence[Sequence[int]]


def sampling_of(control: str, *, greedy: bool) -> dict[str, Any]:
    fields = {"ignore_eos": True, **CONTROLS[control]}
    if greedy:
        return {"temperature": 0.0, "max_tokens": NUM_GREEDY_TOKENS, **fields}
    return {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, **fields}


def to_sampling(fields: dict[str, Any]) -> Sampling:
    """The engine's type for the fields of vLLM's."""
    tuples = {n: tuple(fields[n]) for n in fields if isinstance(fields[n], list)}
    given = fields | tuples
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    if outputs := given.get("structured_outputs"):
        chosen: dict[str, Any] = {n: tuple(v) if n == "choice" else v for n, v in outputs.items()}
        given["structured_outputs"] = StructuredOutputs(**chosen)
    return Sampling(**given)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list(AutoTokenizer.from_pretrained(MODEL).encode(PROMPT))


@pytest.fixture(scope="module")
def plain_greedy(prompt: list[int]) -> dict[str, PlainSample]:
    """A greedy sample of plain vLLM by control."""
    asked = {
        control: PlainRequest(prompt=prompt, n=1, sampling=sampling_of(control, greedy=True))
        for control in CONTROLS
    }
    return {control: sample for control, [sample] in plain_samples(MODEL, asked).items()}


@pytest.fixture(scope="module")
def plain(prompt: list[int]) -> dict[str, list[PlainSample]]:
    """Samples of plain vLLM above temperature 0, by control. They take minutes."""
    asked = {
        control: PlainRequest(
            prompt=prompt, n=NUM_PLAIN, sampling=sampling_of(control, greedy=False)
        )
        for control in CONTROLS
    }
    return plain_samples(MODEL, asked)


@pytest.fixture(scope="module")
def sharing() -> Iterator[LiveEngine]:
    """An engine without drafts; all its samples of a prompt are computed by shared attention."""
    request_hooks.install()
    stop_strings.install()
    unregister()  # an earlier engine in this process may have registered the stock backend
    attention.install(AttentionSettings(shared_prefix="always"))
    try:
        with live_engine(MODEL, skip_tokenizer_init=False, max_num_seqs=128) as engine:
            yield engine
    finally:
        unregister()


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    request_hooks.install()
    stop_strings.install()
    folder = tmp_path_factory.mktemp("drafts")
    with drafting_engine(MODEL, folder, skip_tokenizer_init=False, max_num_seqs=128) as (engine, _):
        yield engine


@dataclass(frozen=True, slots=True)
class Run:
    """Samples of one kind under one control."""

    request: pytest.FixtureRequest
    kind: str
    control: str

    @property
    def engine(self) -> LiveEngine:
        name = "drafting" if "drafts" in self.kind else "sharing"
        engine: LiveEngine = self.request.getfixturevalue(name)
        return engine

    def samples(self, prompt: list[int], num_prior: int, n: int, fields: dict[str, Any]) -> Any:
        """Samples that continue the last `num_prior` tokens of a prompt, with their checks."""
        sampling = to_sampling(fields).after(num_prior, fields["max_tokens"] - num_prior)
        asked = SampleRequest(
            id="",
            prompt_token_ids=prompt,
            sampling=sampling,
            group=f"{self.kind} {self.control} {len(prompt)}",
            num_prior_tokens=num_prior,
            speculation="drafts" in self.kind,
        )
        return self.engine.finish(*(self._submit(asked) for _ in range(n)))

    def _submit(self, asked: SampleRequest) -> str:
        name = f"plain-{next(IDS)}"
        tokens = {"prompt_token_ids": list(asked.prompt_token_ids)}
        self.engine._llm.llm_engine.add_request(name, tokens, sampling_params(asked, 512))
        return name


@every_kind
@every_control
def test_greedy_samples_are_those_of_plain_vllm(
    request: pytest.FixtureRequest,
    plain_greedy: dict[str, PlainSample],
    prompt: list[int],
    control: str,
    kind: str,
) -> None:
    run, fields = Run(request, kind, control), sampling_of(control, greedy=True)
    wanted = plain_greedy[control]
    cuts = range(1, len(wanted.token_ids), 3) if "tree" in kind else [0]
    for cut in cuts:
        begun = prompt + wanted.token_ids[:cut]
        for answer in run.samples(begun, cut, 2 if cut else 4, fields):
            assert answer.token_ids == wanted.token_ids[cut:]
            assert answer.logprobs == pytest.approx(wanted.logprobs[cut:], abs=1e-4, nan_ok=True)
            assert (answer.finish, answer.stop_reason) == (wanted.finish, wanted.stop_reason)


@pytest.mark.exhaustive
@every_kind
@every_control
def test_samples_have_the_distribution_of_plain_vllm(
    request: pytest.FixtureRequest,
    plain: dict[str, list[PlainSample]],
    prompt: list[int],
    control: str,
    kind: str,
) -> None:
    run, fields = Run(request, kind, control), sampling_of(control, greedy=False)
    wanted = plain[control]
    head: list[int] = most_frequent_head(wanted) if "tree" in kind else []
    wanted = [sample for sample in wanted if sample.token_ids[: len(head)] == head]
    before = counted()
    answers = run.samples(prompt + head, len(head), NUM_OURS, fields)
    assert_features_were_used(run, before)
    ours = [head + answer.token_ids for answer in answers]
    theirs = [sample.token_ids for sample in wanted]
    assert have_one_distribution(ours, theirs)
    assert_same_logprobs(answers, wanted, len(head))


@pytest.mark.exhaustive
@every_control
def test_samples_without_a_control_would_be_detected(
    plain: dict[str, list[PlainSample]], control: str
) -> None:
    theirs, without = ([sample.token_ids for sample in plain[name]] for name in (control, "none"))
    same = have_one_distribution(without[:NUM_OURS], theirs[NUM_OURS:])
    assert same == (control in WEAK)


def have_one_distribution(ours: Samples, theirs: Samples) -> bool:
    statistic, freedom = two_sample_chi_square(*cells(ours, theirs))
    return freedom == 0 or p_value((statistic, freedom)) > MIN_P_VALUE


def most_frequent_head(samples: list[PlainSample]) -> list[int]:
    """The most frequent first token of those samples that do not end with it."""
    [(token, _)] = Counter(s.token_ids[0] for s in samples if len(s.token_ids) > 1).most_common(1)
    return [token]


def cells(ours: Samples, theirs: Samples, at: int = 0) -> Any:
    """Numbers of samples, ours and theirs, by their first tokens.

    Samples that begin alike are in the same cell, unless there are many: then the next token
    decides. What the cells are depends on both sets together only.
    """
    if len(ours) + len(theirs) < CELL or all(len(each) <= at for each in [*ours, *theirs]):
        return np.array([len(ours)]), np.array([len(theirs)])
    both = Counter(next_token(each, at) for each in [*ours, *theirs])
    common = {token for token, count in both.items() if count >= CELL // 3}
    parts = []
    for token in sorted(common):
        one, other = ([s for s in each if next_token(s, at) == token] for each in (ours, theirs))
        parts.append(cells(one, other, at + 1))
    rest = [[s for s in each if next_token(s, at) not in common] for each in (ours, theirs)]
    parts.append(tuple(np.array([len(each)]) for each in rest))
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))


def next_token(sample: Sequence[int], at: int) -> int:
    return sample[at] if at < len(sample) else -1


def assert_same_logprobs(answers: list[Answer], wanted: list[PlainSample], start: int) -> None:
    """Equal logprobs wherever both have the same tokens up to a position."""
    known = {
        tuple(sample.token_ids[: n + 1]): sample.logprobs[n]
        for sample in wanted
        for n in range(start, len(sample.token_ids))
    }
    head, num_compared = wanted[0].token_ids[:start], 0
    for answer in answers:
        tokens = head + answer.token_ids
        for n, logprob in enumerate(answer.logprobs, start):
            found = known.get(tuple(tokens[: n + 1]))
            if found is not None:
                assert logprob == pytest.approx(found, abs=1e-4)
                num_compared += 1
    assert num_compared > NUM_OURS / 2


def counted() -> tuple[int, int]:
    """Rows of grouped attention, and accepted drafts."""
    return ATTENTION.read()["rows_grouped"], sum(SPECULATION.read()["accepted"].values())


def assert_features_were_used(run: Run, before: tuple[int, int]) -> None:
    rows, accepted = (now - then for now, then in zip(counted(), before, strict=True))
    if "drafts" in run.kind:
        assert (accepted > 0) == (run.control not in WITHOUT_DRAFTS)
    else:
        assert rows > 0 and accepted == 0
