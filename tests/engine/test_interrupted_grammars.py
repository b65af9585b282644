"""Structured outputs of samples that are interrupted: by a weights update or a preemption.

Each support is compared with the mask of a matcher that gets the same tokens. The logprobs are
those of the weights that each token is labelled with, renormalised over the supports.
"""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from coppice.wire.columns.support import decode_ids, decode_mask
from engine.requests.grammar_check import xgrammar_source
from engine.requests.request_params import sampling_params
from engine.sampling import request_hooks
from engine.speculation.counters import COUNTERS
from engine.types.samples import SampleRequest, Sampling, StructuredOutputs
from tests.engine.seedling import MODEL, reference
from tests.engine.speculation.drafting_engine import drafting_engine
from tests.engine.stepped_engine import Answer, LiveEngine

# Imports of vLLM and its draft methods emit unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPT = "Compute 1+2.\n3\nCompute 30+4.\n34\nCompute 12+34.\n"
MAX_TOKENS = 90
WORDS = ("red", "green", "blue", "grey")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{9,14}$"},
        "list": {"type": "array", "items": {"enum": WORDS}, "minItems": 4, "maxItems": 4},
    },
    "required": ["name", "list"],
    "additionalProperties": False,
}
CHOICES = tuple(f"the {a} and the {b} colour of {c}" for a in WORDS for b in WORDS for c in WORDS)
GRAMMAR = 'root ::= pair pair pair pair "."\npair ::= "(" [0-9] [0-9] "," [a-f] [a-f] [a-f] ")"'
OUTPUTS = {
    "json": StructuredOutputs(json=json.dumps(SCHEMA)),
    "regex": StructuredOutputs(regex="([0-9][a-f]){15,20}!"),
    "choice": StructuredOutputs(choice=CHOICES),
    "grammar": StructuredOutputs(grammar=GRAMMAR),
}
IDS = itertools.count()
every_kind = pytest.mark.parametrize("kind", OUTPUTS)
with_and_without_drafts = pytest.mark.parametrize("drafts", [False, True])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped model, and one with other weights."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("v0", "v1"):
        shutil.copytree(MODEL, folder / name)
    tensors = load_file(MODEL / "model.safetensors")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        changed = {n: t + 0.2 * t.std() * torch.randn_like(t) for n, t in tensors.items()}
    save_file(changed, folder / "v1" / "model.safetensors", metadata={"format": "pt"})
    return {name: folder / name for name in ("v0", "v1")}


@pytest.fixture(scope="module")
def engine(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    """An engine whose KV cache cannot hold twelve samples at once."""
    request_hooks.install()
    folder = tmp_path_factory.mktemp("drafts")
    options: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "num_gpu_blocks_override": 26,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    with drafting_engine(models["v0"], folder, **options) as (engine, _):
        yield engine


@pytest.fixture(autouse=True)
def first_weights(engine: LiveEngine, models: dict[str, Path]) -> Iterator[None]:
    yield
    if engine.serving != models["v0"]:
        engine.swap(models["v0"])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def submit(engine: LiveEngine, request: SampleRequest) -> str:
    name = f"grammar-{next(IDS)}"
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    engine._llm.llm_engine.add_request(name, prompt, sampling_params(request, 512))
    return name


def request_of(tokenizer: Any, kind: str, *, drafts: bool) -> SampleRequest:
    return SampleRequest(
        id="",
        prompt_token_ids=tokenizer.encode(PROMPT),
        sampling=Sampling(max_tokens=MAX_TOKENS, structured_outputs=OUTPUTS[kind]),
        group=f"{kind} {drafts}",
        speculation=drafts,
        support=True,
    )


def satisfies(kind: str, text: str) -> bool:
    """Judgement without a grammar compiler."""
    match kind:
        case "json":
            value = json.loads(text)
            assert set(value) == {"name", "list"} and set(value["list"]) <= set(WORDS)
            return (
                len(value["list"]) == 4 and re.fullmatch("[a-z]{9,14}", value["name"]) is not None
            )
        case "regex":
            return re.fullmatch("([0-9][a-f]){15,20}!", text) is not None
        case "choice":
            return text in CHOICES
    return re.fullmatch(r"(\([0-9]{2},[a-f]{3}\)){4}\.", text) is not None


def assert_masks(tokenizer: Any, kind: str, answer: Answer, vocab_size: int) -> None:
    """Each support is what a new matcher allows after the tokens before it."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    form, text = xgrammar_source(OUTPUTS[kind])
    compile_it = getattr(xgrammar.GrammarCompiler(info), f"compile_{form}")
    compact = {"any_whitespace": False, "separators": (",", ":")}
    compiled = compile_it(text, **(compact if kind == "json" else {}))
    matcher, bitmask = (
        xgrammar.GrammarMatcher(compiled),
        xgrammar.allocate_token_bitmask(1, vocab_size),
    )
    for token, row in zip(answer.token_ids, answer.support, strict=True):
        matcher.fill_next_token_bitmask(bitmask)
        bits = np.unpackbits(bitmask[0].numpy().view(np.uint8), bitorder="little")
        allowed = bits[:vocab_size].astype(bool)
        assert decode_ids(row, vocab_size).tolist() == np.flatnonzero(allowed).tolist()
        assert matcher.accept_token(token)
    assert matcher.is_terminated()


def ratios(folder: Path, prompt: list[int], answer: Answer, start: int = 0) -> list[float]:
    """Importance ratios of tokens from `start` on: the reference's support replay over ours."""
    model = reference(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    masks = np.stack([decode_mask(row, logits.shape[1]) for row in answer.support])
    replayed = logits.double().masked_fill(~torch.from_numpy(masks), -torch.inf).log_softmax(-1)
    chosen = replayed.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    found: list[float] = (chosen - torch.tensor(answer.logprobs)).exp()[start:].tolist()
    return found


def assert_satisfied(tokenizer: Any, kind: str, answer: Answer, vocab_size: int) -> None:
    assert answer.finish == "stop"
    text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert satisfies(kind, text), text
    assert_masks(tokenizer, kind, answer, vocab_size)


def step_until_sampled(engine: LiveEngine, num_tokens: int) -> None:
    """Until each sample has some tokens; grammars are compiled in a thread before the first one."""
    requests = engine.core.scheduler.requests.values()
    while any(request.num_output_tokens < num_tokens for request in requests):
        engine.step()


def vocab_size_of(engine: LiveEngine) -> int:
    return int(engine._llm.llm_engine.model_config.get_vocab_size())


@with_and_without_drafts
@every_kind
def test_grammar_holds_over_a_weights_update(
    engine: LiveEngine, models: dict[str, Path], tokenizer: Any, kind: str, drafts: bool
) -> None:
    """KV is computed again, so that each token has a reference under the weights of its label."""
    request = request_of(tokenizer, kind, drafts=drafts)
    names = [submit(engine, request) for _ in range(4)]
    step_until_sampled(engine, 9)
    engine.swap(models["v1"], recompute=True)
    for answer in engine.finish(*names):
        assert_satisfied(tokenizer, kind, answer, vocab_size_of(engine))
        assert [span.version for span in answer.versions] == ["v0", "v1"]
        for span in answer.versions:
            part = ratios(models[span.version], list(request.prompt_token_ids), answer, span.start)
            assert part[: span.end - span.start] == pytest.approx(
                [1.0] * (span.end - span.start), abs=1e-3
            )


@with_and_without_drafts
def test_grammar_holds_if_kv_is_kept_over_an_update(
    engine: LiveEngine, models: dict[str, Path], tokenizer: Any, drafts: bool
) -> None:
    names = {kind: submit(engine, request_of(tokenizer, kind, drafts=drafts)) for kind in OUTPUTS}
    step_until_sampled(engine, 7)
    engine.swap(models["v1"])
    engine.step()
    engine.swap(models["v0"])
    for kind, answer in zip(names, engine.finish(*names.values()), strict=True):
        assert_satisfied(tokenizer, kind, answer, vocab_size_of(engine))
        assert [span.version for span in answer.versions] == ["v0", "v1", "v0"]


@with_and_without_drafts
def test_grammar_holds_over_preemptions(
    engine: LiveEngine, models: dict[str, Path], tokenizer: Any, drafts: bool
) -> None:
    requests = {kind: request_of(tokenizer, kind, drafts=drafts) for kind in OUTPUTS}
    accepted = sum(COUNTERS.read()["accepted"].values())
    kinds = [*requests] * 4
    names = [submit(engine, requests[kind]) for kind in kinds]
    preempted = set[str]()
    while engine.core.scheduler.has_unfinished_requests():
        engine.step()
        known = engine.core.scheduler.requests.values()
        preempted |= {request.request_id for request in known if request.num_preemptions}
    assert len(preempted) >= 2
    for kind, answer in zip(kinds, engine.finish(*names), strict=True):
        assert_satisfied(tokenizer, kind, answer, vocab_size_of(engine))
        found = ratios(models["v0"], list(requests[kind].prompt_token_ids), answer)
        assert found == pytest.approx([1.0] * len(found), abs=1e-3)
    assert (sum(COUNTERS.read()["accepted"].values()) > accepted) == drafts


@with_and_without_drafts
def test_grammar_holds_after_other_samples_are_aborted(
    engine: LiveEngine, models: dict[str, Path], tokenizer: Any, drafts: bool
) -> None:
    """Samples of one grammar share its compiled form, and later ones take the aborted rows."""
    requests = {kind: request_of(tokenizer, kind, drafts=drafts) for kind in OUTPUTS}
    aborted = [submit(engine, request) for request in requests.values()]
    kept = [submit(engine, request) for request in requests.values()]
    step_until_sampled(engine, 6)
    for name in aborted:
        engine.abort(name)
    later = [submit(engine, request) for request in requests.values()]
    for kind, answer in zip([*requests] * 2, engine.finish(*kept, *later), strict=True):
        assert_satisfied(tokenizer, kind, answer, vocab_size_of(engine))
        found = ratios(models["v0"], list(requests[kind].prompt_token_ids), answer)
        assert found == pytest.approx([1.0] * len(found), abs=1e-3)
