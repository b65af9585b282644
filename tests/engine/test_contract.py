"""Protocol contract shared by the fake engine and the real one."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.errors import ConversationRefused, RequestRefused
from engine.protocol import Engine
from engine.types.chat import ChatRequest
from engine.types.kv import ExportSlot, ExportStatus, KvLoad, LoadPiece
from engine.types.samples import Completion, PauseMode, SampleRequest, Sampling, TokenDelta
from tests.arena import TestArena
from tests.engine.adapters.peft_adapters import saved
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "1+2"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

_COUNT = iter(range(10**9))

CompletionsFuture = asyncio.Future[list[Completion]]


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine, and a function that lets time pass in it."""

    engine: Engine
    advance: Callable[[], Awaitable[None]]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["fake", pytest.param("real", marks=pytest.mark.engine)],
)
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[EngineUnderTest]:
    made = _fake() if request.param == "fake" else _real()
    await made.engine.start("v0")
    yield made
    await made.engine.stop()
    await made.engine.stop()


def _fake() -> EngineUnderTest:
    engine = FakeEngine(instant=False, prompt_kv=True, max_adapters=2)

    async def advance() -> None:
        engine.step(2)
        await asyncio.sleep(0)

    return EngineUnderTest(engine, advance)


def _real() -> EngineUnderTest:
    from engine.vllm_engine import VllmEngine
    from tests.engine.seedling import settings

    async def advance() -> None:
        await asyncio.sleep(0.05)

    served = settings(prompt_kv=True, tool_parser="hermes", max_adapters=2)
    return EngineUnderTest(VllmEngine(served), advance)


@pytest.fixture
def arena(under_test: EngineUnderTest, tmp_path: Path) -> TestArena:
    form = under_test.engine.info.kv_format
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


async def submitted(under_test: EngineUnderTest, *samples: SampleRequest) -> CompletionsFuture:
    return asyncio.gather(*await under_test.engine.submit(samples))


async def finished(under_test: EngineUnderTest, gathered: CompletionsFuture) -> list[Completion]:
    async with asyncio.timeout(120):
        while not gathered.done():
            await under_test.advance()
    return list(gathered.result())


def assert_whole(completion: Completion) -> None:
    """Asserts one logprob and one version per token."""
    assert len(completion.logprobs) == len(completion.token_ids)
    covered = [span.end - span.start for span in completion.versions]
    assert sum(covered) == len(completion.token_ids)


async def test_each_sample_of_a_call_has_one_completion_in_order(
    under_test: EngineUnderTest,
) -> None:
    pending = await submitted(under_test, sample(4), sample(9))
    short, long = await finished(under_test, pending)
    assert (len(short.token_ids), len(long.token_ids)) == (4, 9)
    for completion in (short, long):
        assert completion.finish == "length"
        assert_whole(completion)
        assert completion.versions[0].version == "v0"


async def test_entropy_is_returned_per_token_on_request(
    under_test: EngineUnderTest,
) -> None:
    """In a batch with a sample that does not request it."""
    asking = replace(sample(5), entropy_top_k=4)
    one, other = await finished(under_test, await submitted(under_test, asking, sample(5)))
    assert one.entropy is not None and len(one.entropy) == 5
    assert all(value >= 0 for value in one.entropy)
    assert other.entropy is None
    assert_whole(one)


async def test_abort_ends_a_sample_at_once_with_its_tokens_so_far(
    under_test: EngineUnderTest,
) -> None:
    ended, going_on = sample(900), sample(6)
    pending = await under_test.engine.submit([ended, going_on])
    rest = asyncio.gather(*pending[1:])
    for _ in range(2):
        await under_test.advance()
    await under_test.engine.abort([ended.id])
    async with asyncio.timeout(60):
        completion = await pending[0]
    assert completion.finish == "abort"
    assert len(completion.token_ids) < 900
    assert_whole(completion)
    (other,) = await finished(under_test, rest)
    assert other.finish == "length"


async def test_tokens_are_delivered_while_their_sample_runs(under_test: EngineUnderTest) -> None:
    """Once each, as in the completion, of the sample alone that requests them."""
    deltas: list[TokenDelta] = []
    streamed = replace(sample(40), on_tokens=deltas.append, num_top_logprobs=2)
    pending = await submitted(under_test, streamed, sample(40))
    completion, _ = await finished(under_test, pending)
    assert len(deltas) > 3
    assert_prefix(deltas, completion)
    assert completion.top_logprobs is not None
    top_logprobs = [place for delta in deltas for place in delta.top_logprobs or ()]
    assert top_logprobs == list(completion.top_logprobs[: len(top_logprobs)])
    assert len(top_logprobs) == sum(len(delta.token_ids) for delta in deltas)


async def test_delivered_tokens_have_the_version_that_sampled_them(
    under_test: EngineUnderTest,
) -> None:
    engine, deltas = under_test.engine, list[TokenDelta]()
    pending = await submitted(under_test, replace(sample(300), on_tokens=deltas.append))
    while not deltas:
        await under_test.advance()
    await engine.pause("keep")
    before = engine.health()
    num_deltas = len(deltas)
    for _ in range(3):
        await under_test.advance()
    assert len(deltas) <= num_deltas + 1 and before.alive
    await engine.update_weights(engine.info.model_path, "streamed")
    await engine.resume()
    (completion,) = await finished(under_test, pending)
    await engine.pause("keep")
    await engine.update_weights(engine.info.model_path, "v0")  # other tests use this engine
    await engine.resume()
    assert_prefix(deltas, completion)
    assert [span.version for span in completion.versions][-1] == "streamed"
    assert deltas[-1].versions[-1].version == "streamed"


async def test_abort_ends_the_delivery_of_tokens(under_test: EngineUnderTest) -> None:
    deltas: list[TokenDelta] = []
    streamed = replace(sample(900), on_tokens=deltas.append)
    pending = await submitted(under_test, streamed)
    while not deltas:
        await under_test.advance()
    await under_test.engine.abort([streamed.id])
    (completion,) = await finished(under_test, pending)
    num_deltas = len(deltas)
    for _ in range(3):
        await under_test.advance()
    assert completion.finish == "abort" and len(deltas) == num_deltas
    assert_prefix(deltas, completion)


def assert_prefix(deltas: Sequence[TokenDelta], completion: Completion) -> None:
    """Asserts that the deltas are consecutive and agree with the completion."""
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == completion.token_ids[: len(tokens)]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert logprobs == completion.logprobs[: len(tokens)]
    starts = accumulate((len(delta.token_ids) for delta in deltas), initial=0)
    assert [delta.start for delta in deltas] == list(starts)[:-1]
    for delta in deltas:
        assert delta.versions[0].start == delta.start
        assert delta.versions[-1].end == delta.start + len(delta.token_ids)
        for span in delta.versions:
            [whole] = [s for s in completion.versions if s.start <= span.start < s.end]
            assert (whole.version, span.end <= whole.end) == (span.version, True)


async def test_progress_grows_while_a_sample_runs(under_test: EngineUnderTest) -> None:
    engine, running = under_test.engine, sample(400)
    assert engine.progress(["never seen"]) == [()]
    pending = await submitted(under_test, running)
    lengths: list[int] = []
    async with asyncio.timeout(120):
        while not lengths or lengths[-1] < 5:
            await under_test.advance()
            [spans] = engine.progress([running.id])
            lengths.append(spans[-1].end if spans else 0)
            assert all((span.version, span.start) == ("v0", 0) for span in spans)
    assert lengths == sorted(lengths) and lengths[-1] < 400
    await engine.abort([running.id])
    (completion,) = await finished(under_test, pending)
    assert len(completion.token_ids) >= lengths[-1]
    assert engine.progress([running.id]) == [()]


async def test_abort_ignores_finished_and_unknown_samples(under_test: EngineUnderTest) -> None:
    done = sample(2)
    await finished(under_test, await submitted(under_test, done))
    await under_test.engine.abort([done.id, "never seen"])
    await under_test.engine.abort([])


async def test_nothing_is_sampled_between_pause_and_resume(under_test: EngineUnderTest) -> None:
    before = await submitted(under_test, sample(400))
    await under_test.engine.pause("keep")
    await under_test.engine.pause("keep")
    during = await submitted(under_test, sample(3))
    for _ in range(4):
        await under_test.advance()
    assert not before.done() and not during.done()
    await under_test.engine.resume()
    await under_test.engine.resume()
    for gathered in (before, during):
        (completion,) = await finished(under_test, gathered)
        assert completion.finish == "length"


@pytest.mark.parametrize(
    ("mode", "finish", "max_tokens"), [("abort", "abort", 900), ("wait", "length", 40)]
)
async def test_pause_aborts_running_samples_or_lets_them_finish(
    under_test: EngineUnderTest, mode: PauseMode, finish: str, max_tokens: int
) -> None:
    pending = await submitted(under_test, sample(max_tokens))
    await under_test.advance()
    await under_test.engine.pause(mode)
    async with asyncio.timeout(60):
        (completion,) = await pending
    assert completion.finish == finish
    assert_whole(completion)
    await under_test.engine.resume()


async def test_cancelled_wait_for_running_samples_is_followed_by_other_pauses(
    under_test: EngineUnderTest,
) -> None:
    engine = under_test.engine
    running = await submitted(under_test, sample(400))
    await under_test.advance()
    draining = asyncio.ensure_future(engine.pause("wait"))
    await asyncio.sleep(0)
    await under_test.advance()
    assert not draining.done()
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    await engine.pause("keep")
    held = await submitted(under_test, sample(3))
    for _ in range(4):
        await under_test.advance()
    assert not running.done() and not held.done()
    await engine.resume()
    for gathered in (running, held):
        (completion,) = await finished(under_test, gathered)
        assert completion.finish == "length"


async def test_pause_may_drop_the_cache_of_frozen_samples(under_test: EngineUnderTest) -> None:
    pending = await submitted(under_test, sample(40))
    await under_test.advance()
    await under_test.engine.pause("keep", recompute=True)
    await under_test.engine.resume()
    (completion,) = await finished(under_test, pending)
    assert len(completion.token_ids) == 40


async def test_updated_weights_label_the_tokens_that_follow(
    under_test: EngineUnderTest, tmp_path: Path
) -> None:
    engine = under_test.engine
    long, short = await engine.submit([sample(300), sample(1)])
    pending = asyncio.gather(*[long])
    await finished(under_test, asyncio.gather(*[short]))
    await engine.pause("keep")
    path = engine.info.model_path
    engine.check_weights(path)
    await engine.update_weights(path, "v1")
    await engine.resume()
    (completion,) = await finished(under_test, pending)
    assert [span.version for span in completion.versions] == ["v0", "v1"]
    assert_whole(completion)


async def test_health_reports_the_stage_of_the_engine(under_test: EngineUnderTest) -> None:
    health = under_test.engine.health()
    assert (health.stage, health.alive) == ("serving", True)


async def test_text_round_trips_through_tokens(under_test: EngineUnderTest) -> None:
    tokens = under_test.engine.encode_text("1+2=3")
    assert max(tokens) < under_test.engine.info.vocab_size
    assert "1+2=3" in under_test.engine.decode(tokens)


PROMPT = tuple(range(5, 75))


async def test_export_is_complete_before_its_sample_ends(
    under_test: EngineUnderTest, arena: TestArena
) -> None:
    slot = arena.slot(len(PROMPT) - 1)
    pending = await submitted(under_test, sample(400, prompt=PROMPT, export=slot), sample(3))
    async with asyncio.timeout(120):
        while arena.words(slot) == [ExportStatus.PENDING]:
            await under_test.advance()
    assert arena.words(slot) == [ExportStatus.COMMITTED]
    assert not pending.done()
    whole = arena.data(slot)
    assert not arena.untouched(slot)
    await finished(under_test, pending)
    await under_test.engine.flush_exports()
    assert (arena.data(slot) == whole).all(), "an export is written once"
    arena.check()


async def test_shared_prefix_has_the_same_bytes_in_two_slots(
    under_test: EngineUnderTest, arena: TestArena
) -> None:
    """Only whole blocks: each sample prefills the rest itself, with its own rounding."""
    slots = [arena.slot(len(PROMPT) - 1) for _ in range(2)]
    samples = [sample(2, prompt=PROMPT, export=slot) for slot in slots]
    await finished(under_test, await submitted(under_test, *samples))
    await under_test.engine.flush_exports()
    assert [arena.words(slot) for slot in slots] == [[ExportStatus.COMMITTED]] * 2
    block = under_test.engine.info.block_size
    shared = [arena.first_tokens(slot, len(PROMPT) // block * block) for slot in slots]
    assert shared[0].shape[1] > 0
    assert (shared[0] == shared[1]).all()
    arena.check()


async def test_export_of_an_aborted_sample_is_never_written(
    under_test: EngineUnderTest, arena: TestArena
) -> None:
    slot = arena.slot(len(PROMPT) - 1)
    await under_test.engine.pause("keep")
    aborted = sample(5, prompt=PROMPT, export=slot)
    pending = await submitted(under_test, aborted)
    await under_test.engine.abort([aborted.id])
    await under_test.engine.flush_exports()
    assert arena.words(slot) == [ExportStatus.PENDING]
    await under_test.engine.resume()
    await finished(under_test, pending)
    for _ in range(3):
        await under_test.advance()
    assert arena.words(slot) == [ExportStatus.PENDING]
    assert arena.untouched(slot)


async def test_slot_outside_the_file_fails_and_is_not_written(
    under_test: EngineUnderTest, arena: TestArena
) -> None:
    inside = arena.slot(len(PROMPT) - 1)
    outside = ExportSlot(
        arena=inside.arena,
        offset=len(arena.bytes) - 64,
        status_offset=inside.status_offset,
        num_tokens=inside.num_tokens,
    )
    (completion,) = await finished(
        under_test, await submitted(under_test, sample(3, prompt=PROMPT, export=outside))
    )
    await under_test.engine.flush_exports()
    assert completion.finish == "length"
    assert arena.words(inside) == [ExportStatus.FAILED]
    assert arena.untouched(inside)
    arena.check()


async def test_conversation_is_rendered_with_the_template_of_the_model(
    under_test: EngineUnderTest,
) -> None:
    plain = under_test.engine.encode_chat(ChatRequest(messages=MESSAGES))
    options = {"tokenize": False, "add_generation_prompt": False, "no_such_name": 1}
    asked = ChatRequest(messages=MESSAGES, template_options=options)
    assert under_test.engine.encode_chat(asked) == plain


async def test_tokens_after_a_message_of_the_assistant_continue_its_sample(
    under_test: EngineUnderTest,
) -> None:
    engine = under_test.engine
    sample = engine.encode_text("3", add_special_tokens=False)
    turns = [*MESSAGES, {"role": "assistant", "content": "3"}, {"role": "user", "content": "2+2"}]
    conversation = ChatRequest(messages=turns)
    whole = engine.encode_chat(conversation)
    after = engine.encode_chat_after(conversation, 1, last_token=sample[-1])
    assert [*engine.encode_chat(ChatRequest(messages=MESSAGES)), *sample, *after] == whole
    eos = engine.info.eos_token_ids[0]
    ended = engine.encode_chat_after(conversation, 1, last_token=eos)
    assert after in ([eos, *ended], ended), "a sample that ended needs no other end"
    rewritten = [MESSAGES[0], {**turns[1], "content": "x", "reasoning": "y"}, turns[2]]
    other = ChatRequest(messages=rewritten)
    assert engine.encode_chat_after(other, 1, last_token=sample[-1]) == after


async def test_tokenizer_arguments_are_not_template_options(
    under_test: EngineUnderTest,
) -> None:
    options = {"padding": "max_length", "max_length": 2000}
    with pytest.raises(ConversationRefused, match="max_length"):
        under_test.engine.encode_chat(ChatRequest(messages=MESSAGES, template_options=options))


async def test_tool_call_is_separated_from_text(under_test: EngineUnderTest) -> None:
    written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tokens = under_test.engine.encode_text(written)
    with_tools = ChatRequest(messages=MESSAGES, tools=[ADD])
    [call] = under_test.engine.chat_response(tokens, with_tools).tool_calls
    assert (call.name, type(json.loads(call.arguments))) == ("add", dict)
    assert call.id
    plain = under_test.engine.chat_response(tokens, ChatRequest(messages=MESSAGES))
    assert plain.tool_calls == ()
    assert plain.content == under_test.engine.decode(tokens)


async def test_rendering_and_parsing_do_not_modify_a_conversation(
    under_test: EngineUnderTest,
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns: list[dict[str, Any]] = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    asked = ChatRequest(messages=turns, tools=[ADD])
    before = copy.deepcopy(asked)
    tokens = under_test.engine.encode_chat(asked)
    assert [under_test.engine.chat_response(tokens, asked).parsed for _ in range(2)] == [True, True]
    assert asked == before


async def test_samples_continue_after_a_prefix_cache_reset(under_test: EngineUnderTest) -> None:
    running = await submitted(under_test, sample(6))
    await under_test.engine.pause("keep")
    await under_test.engine.reset_prefix_cache()
    await under_test.engine.resume()
    while not running.done():
        await under_test.advance()
    assert len(running.result()[0].token_ids) == 6


def load_of(source: ExportSlot, num_tokens: int) -> KvLoad:
    """Load of the first tokens of an export at the beginning of a prompt."""
    piece = LoadPiece(source=source, token_offset=0, num_tokens=num_tokens, start=0, shift=0)
    return KvLoad(chain=str(source.name), num_requests=1, exact_tokens=0, pieces=(piece,))


async def test_load_is_used_once_its_source_is_written(
    under_test: EngineUnderTest, arena: TestArena
) -> None:
    """Completely, or not at all."""
    written = replace(arena.slot(len(PROMPT) - 1), name="written")
    unwritten = replace(arena.slot(len(PROMPT) - 1), name="unwritten")
    await finished(
        under_test, await submitted(under_test, sample(2, prompt=PROMPT, export=written))
    )
    num_tokens = len(PROMPT) - 5
    loads = [load_of(source, num_tokens) for source in (written, unwritten)]
    samples = [replace(sample(2, prompt=PROMPT), load=load) for load in loads]
    loaded, computed = await finished(under_test, await submitted(under_test, *samples))
    assert (loaded.num_cached_tokens, computed.num_cached_tokens) == (num_tokens, 0)
    assert arena.untouched(unwritten)


@pytest.mark.filterwarnings("ignore")  # PEFT emits unrelated warnings
async def test_samples_use_the_adapters_that_are_loaded(
    under_test: EngineUnderTest, tmp_path: Path
) -> None:
    engine, adapter = under_test.engine, saved(tmp_path / "a", seed=1, rank=8)
    assert engine.check_adapter(adapter).rank == 8
    await engine.load_adapter("a@1", adapter)
    await engine.load_adapter("a@2", adapter)
    adapted = [replace(sample(5), adapter=label) for label in ("a@1", "a@2", None)]
    for completion in await finished(under_test, await submitted(under_test, *adapted)):
        assert_whole(completion)
    assert len(await engine.score([1, 2], [3, 4, 5], "a@1")) == 3
    for label in ("a@1", "a@2", "a@2"):
        await engine.unload_adapter(label)
    with pytest.raises(RequestRefused):
        await engine.submit([replace(sample(5), adapter="a@1")])
    await engine.load_adapter("a@1", adapter)
    await engine.unload_adapter("a@1")


async def test_top_logprobs_follow_the_token_itself(under_test: EngineUnderTest) -> None:
    asking = replace(sample(3), num_top_logprobs=2)
    one, other = await finished(under_test, await submitted(under_test, asking, sample(3)))
    assert other.top_logprobs is None
    assert one.top_logprobs is not None
    assert [place[0].token_id for place in one.top_logprobs] == one.token_ids
    assert [place[0].logprob for place in one.top_logprobs] == one.logprobs
    nothing, *rest = await under_test.engine.top_logprobs([5, 6, 7], 2)
    assert nothing == []
    assert [place[0].token_id for place in rest] == [6, 7]
    for place in (*one.top_logprobs, *rest):
        assert [ranked.rank for ranked in place[1:]] == [1, 2]
