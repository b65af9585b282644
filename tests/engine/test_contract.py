"""What the fake engine and the real one have in common: the protocol's contract."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.errors import ConversationRefused, RequestRefused
from engine.kv_types import ExportSlot, ExportWord, Load, LoadPiece
from engine.protocol import Completion, Conversation, Engine, PauseMode, SampleRequest, Sampling
from tests.arena import TestArena
from tests.engine.adapters.peft_adapters import saved
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = [{"role": "user", "content": "1+2"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

_COUNT = iter(range(10**9))

Gathered = asyncio.Future[list[Completion]]


@dataclass(frozen=True)
class Subject:
    """An engine and what it takes to let time pass in it."""

    engine: Engine
    advance: Callable[[], Awaitable[None]]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["fake", pytest.param("real", marks=pytest.mark.engine)],
)
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    made = _fake() if request.param == "fake" else _real()
    await made.engine.start("v0")
    yield made
    await made.engine.stop()
    await made.engine.stop()


def _fake() -> Subject:
    engine = FakeEngine(instant=False, prompt_kv=True, max_adapters=2)

    async def advance() -> None:
        engine.step(2)
        await asyncio.sleep(0)

    return Subject(engine, advance)


def _real() -> Subject:
    from engine.vllm_engine import VllmEngine
    from tests.engine.seedling import settings

    async def advance() -> None:
        await asyncio.sleep(0.05)

    served = settings(prompt_kv=True, tool_parser="hermes", max_adapters=2)
    return Subject(VllmEngine(served), advance)


@pytest.fixture
def arena(subject: Subject, tmp_path: Path) -> TestArena:
    form = subject.engine.facts.kv_format
    assert form is not None
    return TestArena(tmp_path / "arena", form)


def sample(
    max_tokens: int, *, prompt: tuple[int, ...] = (1, 2, 3), export: ExportSlot | None = None
) -> SampleRequest:
    return SampleRequest(
        id=f"c{next(_COUNT)}",
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        export=export,
    )


async def submitted(subject: Subject, *samples: SampleRequest) -> Gathered:
    return asyncio.gather(*await subject.engine.submit(samples))


async def finished(subject: Subject, gathered: Gathered) -> list[Completion]:
    async with asyncio.timeout(120):
        while not gathered.done():
            await subject.advance()
    return list(gathered.result())


def assert_whole(completion: Completion) -> None:
    """One logprob and one version a token."""
    assert len(completion.logprobs) == len(completion.token_ids)
    covered = [span.end - span.start for span in completion.versions]
    assert sum(covered) == len(completion.token_ids)


async def test_each_sample_of_a_call_has_one_completion_in_order(subject: Subject) -> None:
    pending = await submitted(subject, sample(4), sample(9))
    short, long = await finished(subject, pending)
    assert (len(short.token_ids), len(long.token_ids)) == (4, 9)
    for completion in (short, long):
        assert completion.finish == "length"
        assert_whole(completion)
        assert completion.versions[0].version == "v0"


async def test_entropy_comes_with_every_token_of_those_that_ask_for_it(subject: Subject) -> None:
    """Side by side with one that does not."""
    asking = replace(sample(5), entropy_over=4)
    one, other = await finished(subject, await submitted(subject, asking, sample(5)))
    assert one.entropy is not None and len(one.entropy) == 5
    assert all(value >= 0 for value in one.entropy)
    assert other.entropy is None
    assert_whole(one)


async def test_abort_ends_a_sample_at_once_with_its_tokens_so_far(subject: Subject) -> None:
    ended, going_on = sample(900), sample(6)
    pending = await subject.engine.submit([ended, going_on])
    rest = asyncio.gather(*pending[1:])
    for _ in range(2):
        await subject.advance()
    await subject.engine.abort([ended.id])
    async with asyncio.timeout(60):
        completion = await pending[0]
    assert completion.finish == "abort"
    assert len(completion.token_ids) < 900
    assert_whole(completion)
    (other,) = await finished(subject, rest)
    assert other.finish == "length"


async def test_abort_ignores_what_is_finished_or_unknown(subject: Subject) -> None:
    done = sample(2)
    await finished(subject, await submitted(subject, done))
    await subject.engine.abort([done.id, "never seen"])
    await subject.engine.abort([])


async def test_nothing_is_sampled_between_pause_and_resume(subject: Subject) -> None:
    before = await submitted(subject, sample(400))
    await subject.engine.pause("keep")
    await subject.engine.pause("keep")
    during = await submitted(subject, sample(3))
    for _ in range(4):
        await subject.advance()
    assert not before.done() and not during.done()
    await subject.engine.resume()
    await subject.engine.resume()
    for gathered in (before, during):
        (completion,) = await finished(subject, gathered)
        assert completion.finish == "length"


@pytest.mark.parametrize(
    ("mode", "finish", "max_tokens"), [("abort", "abort", 900), ("wait", "length", 40)]
)
async def test_pause_ends_running_samples_or_lets_them_end(
    subject: Subject, mode: PauseMode, finish: str, max_tokens: int
) -> None:
    pending = await submitted(subject, sample(max_tokens))
    await subject.advance()
    await subject.engine.pause(mode)
    async with asyncio.timeout(60):
        (completion,) = await pending
    assert completion.finish == finish
    assert_whole(completion)
    await subject.engine.resume()


async def test_pause_may_drop_the_cache_of_frozen_samples(subject: Subject) -> None:
    pending = await submitted(subject, sample(40))
    await subject.advance()
    await subject.engine.pause("keep", recompute=True)
    await subject.engine.resume()
    (completion,) = await finished(subject, pending)
    assert len(completion.token_ids) == 40


async def test_swapped_weights_stamp_the_tokens_that_follow(
    subject: Subject, tmp_path: Path
) -> None:
    engine = subject.engine
    long, short = await engine.submit([sample(300), sample(1)])
    pending = asyncio.gather(*[long])
    await finished(subject, asyncio.gather(*[short]))
    await engine.pause("keep")
    path = engine.facts.model_path
    engine.check_weights(path)
    await engine.swap_weights(path, "v1")
    await engine.resume()
    (completion,) = await finished(subject, pending)
    assert [span.version for span in completion.versions] == ["v0", "v1"]
    assert_whole(completion)


async def test_the_pulse_says_what_the_engine_does(subject: Subject) -> None:
    pulse = subject.engine.pulse()
    assert (pulse.stage, pulse.alive) == ("serving", True)


async def test_text_becomes_tokens_and_back(subject: Subject) -> None:
    tokens = subject.engine.encode_text("1+2=3")
    assert max(tokens) < subject.engine.facts.vocab_size
    assert "1+2=3" in subject.engine.decode(tokens)


async def test_the_texts_of_tokens_are_the_text(subject: Subject) -> None:
    tokens = subject.engine.encode_text("1+2=3 \n", add_special_tokens=False)
    assert "".join(subject.engine.token_texts(tokens)) == "1+2=3 \n"
    assert len(subject.engine.token_pieces(tokens)) == len(tokens)
    assert subject.engine.token_texts([]) == subject.engine.token_pieces([]) == []


async def test_special_tokens_have_a_text(subject: Subject) -> None:
    end = subject.engine.facts.eos_token_ids[0]
    [text] = subject.engine.token_texts([end])
    assert text == subject.engine.decode([end], skip_special_tokens=False) != ""


async def test_every_id_of_the_vocabulary_has_a_text(subject: Subject) -> None:
    """A vocabulary may be padded beyond what the tokenizer knows."""
    last = [subject.engine.facts.vocab_size - 1]
    assert len(subject.engine.token_texts(last)) == len(subject.engine.token_pieces(last)) == 1


PROMPT = tuple(range(5, 75))


async def test_an_export_is_whole_before_its_sample_ends(
    subject: Subject, arena: TestArena
) -> None:
    slot = arena.slot(len(PROMPT) - 1)
    pending = await submitted(subject, sample(400, prompt=PROMPT, export=slot), sample(3))
    async with asyncio.timeout(120):
        while arena.words(slot) == [ExportWord.PENDING]:
            await subject.advance()
    assert arena.words(slot) == [ExportWord.COMMITTED]
    assert not pending.done()
    whole = arena.data(slot)
    assert not arena.untouched(slot)
    await finished(subject, pending)
    await subject.engine.settle_exports()
    assert (arena.data(slot) == whole).all(), "an export is written once"
    arena.check()


async def test_what_two_samples_share_has_the_same_bytes_in_two_slots(
    subject: Subject, arena: TestArena
) -> None:
    """Whole blocks; what comes after them each computes for itself, and rounds for itself."""
    slots = [arena.slot(len(PROMPT) - 1) for _ in range(2)]
    samples = [sample(2, prompt=PROMPT, export=slot) for slot in slots]
    await finished(subject, await submitted(subject, *samples))
    await subject.engine.settle_exports()
    assert [arena.words(slot) for slot in slots] == [[ExportWord.COMMITTED]] * 2
    block = subject.engine.facts.block_size
    shared = [arena.first_tokens(slot, len(PROMPT) // block * block) for slot in slots]
    assert shared[0].shape[1] > 0
    assert (shared[0] == shared[1]).all()
    arena.check()


async def test_an_export_whose_sample_is_aborted_first_is_never_written(
    subject: Subject, arena: TestArena
) -> None:
    slot = arena.slot(len(PROMPT) - 1)
    await subject.engine.pause("keep")
    aborted = sample(5, prompt=PROMPT, export=slot)
    pending = await submitted(subject, aborted)
    await subject.engine.abort([aborted.id])
    await subject.engine.settle_exports()
    assert arena.words(slot) == [ExportWord.PENDING]
    await subject.engine.resume()
    await finished(subject, pending)
    for _ in range(3):
        await subject.advance()
    assert arena.words(slot) == [ExportWord.PENDING]
    assert arena.untouched(slot)


async def test_a_slot_that_leaves_the_file_fails_and_is_not_written(
    subject: Subject, arena: TestArena
) -> None:
    inside = arena.slot(len(PROMPT) - 1)
    outside = ExportSlot(
        arena=inside.arena,
        offset=len(arena.bytes) - 64,
        words_offset=inside.words_offset,
        num_tokens=inside.num_tokens,
    )
    (completion,) = await finished(
        subject, await submitted(subject, sample(3, prompt=PROMPT, export=outside))
    )
    await subject.engine.settle_exports()
    assert completion.finish == "length"
    assert arena.words(inside) == [ExportWord.FAILED]
    assert arena.untouched(inside)
    arena.check()


async def test_a_conversation_is_rendered_by_the_models_own_template(subject: Subject) -> None:
    plain = subject.engine.encode_conversation(Conversation(messages=ASKED))
    options = {"tokenize": False, "add_generation_prompt": False, "no_such_name": 1}
    asked = Conversation(messages=ASKED, template_options=options)
    assert subject.engine.encode_conversation(asked) == plain


async def test_arguments_of_the_tokenizer_are_no_options_of_a_template(subject: Subject) -> None:
    options = {"padding": "max_length", "max_length": 2000}
    with pytest.raises(ConversationRefused, match="max_length"):
        subject.engine.encode_conversation(Conversation(messages=ASKED, template_options=options))


async def test_a_call_of_a_tool_is_told_apart_from_text(subject: Subject) -> None:
    written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tokens = subject.engine.encode_text(written)
    with_tools = Conversation(messages=ASKED, tools=[ADD])
    [call] = subject.engine.reply(tokens, with_tools).tool_calls
    assert (call.name, type(json.loads(call.arguments))) == ("add", dict)
    assert call.id
    plain = subject.engine.reply(tokens, Conversation(messages=ASKED))
    assert plain.tool_calls == ()
    assert plain.content == subject.engine.decode(tokens)


async def test_a_conversation_is_not_changed_by_rendering_and_parsing(subject: Subject) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns: list[dict[str, Any]] = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    asked = Conversation(messages=turns, tools=[ADD])
    before = copy.deepcopy(asked)
    tokens = subject.engine.encode_conversation(asked)
    assert [subject.engine.reply(tokens, asked).parsed for _ in range(2)] == [True, True]
    assert asked == before


async def test_samples_run_on_after_prefixes_are_forgotten(subject: Subject) -> None:
    running = await submitted(subject, sample(6))
    await subject.engine.pause("keep")
    await subject.engine.forget_prefixes()
    await subject.engine.resume()
    while not running.done():
        await subject.advance()
    assert len(running.result()[0].token_ids) == 6


async def test_a_load_is_taken_once_its_source_is_written(
    subject: Subject, arena: TestArena
) -> None:
    """Whole, or not at all."""
    written = replace(arena.slot(len(PROMPT) - 1), name="written")
    unwritten = replace(arena.slot(len(PROMPT) - 1), name="unwritten")
    await finished(subject, await submitted(subject, sample(2, prompt=PROMPT, export=written)))
    num_tokens = len(PROMPT) - 5
    loads = [
        Load(
            chain=str(source.name),
            num_requests=1,
            exact_tokens=0,
            pieces=(LoadPiece(source=source, skip=0, num_tokens=num_tokens, start=0, shift=0),),
        )
        for source in (written, unwritten)
    ]
    samples = [replace(sample(2, prompt=PROMPT), load=load) for load in loads]
    loaded, computed = await finished(subject, await submitted(subject, *samples))
    assert (loaded.num_cached_tokens, computed.num_cached_tokens) == (num_tokens, 0)
    assert arena.untouched(unwritten)


@pytest.mark.filterwarnings("ignore")  # PEFT's own affairs
async def test_samples_are_drawn_under_adapters_that_are_loaded(
    subject: Subject, tmp_path: Path
) -> None:
    engine, adapter = subject.engine, saved(tmp_path / "a", seed=1, rank=8)
    assert engine.check_adapter(adapter).rank == 8
    await engine.load_adapter("a@1", adapter)
    await engine.load_adapter("a@2", adapter)
    adapted = [replace(sample(5), adapter=label) for label in ("a@1", "a@2", None)]
    for completion in await finished(subject, await submitted(subject, *adapted)):
        assert_whole(completion)
    assert len(await engine.score([1, 2], [3, 4, 5], "a@1")) == 3
    for label in ("a@1", "a@2", "a@2"):
        await engine.unload_adapter(label)
    with pytest.raises(RequestRefused):
        await engine.submit([replace(sample(5), adapter="a@1")])
    await engine.load_adapter("a@1", adapter)
    await engine.unload_adapter("a@1")


async def test_the_likeliest_follow_the_token_that_is_there(subject: Subject) -> None:
    asking = replace(sample(3), num_likeliest=2)
    one, other = await finished(subject, await submitted(subject, asking, sample(3)))
    assert other.likeliest is None
    assert one.likeliest is not None
    assert [place[0].token_id for place in one.likeliest] == one.token_ids
    assert [place[0].logprob for place in one.likeliest] == one.logprobs
    nothing, *rest = await subject.engine.likeliest([5, 6, 7], 2)
    assert nothing == []
    assert [place[0].token_id for place in rest] == [6, 7]
    for place in (*one.likeliest, *rest):
        assert [ranked.rank for ranked in place[1:]] == [1, 2]
