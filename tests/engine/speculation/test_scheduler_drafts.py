"""Drafts that are looked up during the step before, through vLLM's scheduler and request states."""

from typing import Any

import numpy as np
import pytest

from engine.speculation.cost import Profile
from engine.speculation.draft_message import lookup_length
from engine.speculation.request_table import NO_DRAFTS_ARG
from engine.speculation.worker.gpu_speculator import SiblingSpeculator
from kernels.draft_index.store_protocol import DraftBatch, Int32Array, InvalidCall, Store
from tests.engine.speculation.drafting_engine import SendUniformDrafts
from tests.engine.speculation.fake_gpu import step_seconds, text_model
from tests.engine.speculation.second_runner import (
    LONGEST,
    PROMPT,
    ROWS,
    Engine,
    add_group,
)
from tests.kernels.draft_index.reference import ReferenceStore

pytestmark = pytest.mark.usefixtures("second_runner")
SYNC_ASYNC = pytest.mark.parametrize("is_async", [True, False])


class Uniform(SendUniformDrafts):
    """Verifies every draft, and records step times."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[int, float]] = []

    def record_step(self, *, verified: int, seconds: float, **step: Any) -> None:
        self.times.append((verified, seconds))


def store() -> Store:
    return ReferenceStore(max_bytes=2**22, max_draft_tokens=lookup_length(LONGEST))


def drafting(config: Any, **changes: Any) -> Engine:
    engine = Engine(config, text_model(), **changes)
    engine.drafts = engine.draft_with(store(), Uniform())
    return engine


def plain(config: Any, **changes: Any) -> Engine:
    engine = Engine(config, text_model(), **changes)
    engine.draft_nothing()
    return engine


@SYNC_ASYNC
def test_texts_are_the_same_with_drafts_in_fewer_steps(config: Any, is_async: bool) -> None:
    config.scheduler_config.async_scheduling = is_async
    with_drafts, without = add_group(drafting(config)), add_group(plain(config))
    assert isinstance(with_drafts.executor.runner.speculator, SiblingSpeculator)
    assert with_drafts.run() == without.run()
    assert len(with_drafts.executor.shapes) < 0.7 * len(without.executor.shapes)


def test_decode_steps_have_one_number_of_query_tokens(config: Any) -> None:
    """vLLM's full CUDA graphs need it, also while a prompt's first token has not arrived."""
    engine = add_group(drafting(config))
    engine.run()
    decode = [shape for shape in engine.executor.shapes if max(shape) <= LONGEST + 1]
    assert len(decode) > 30
    assert all(len(set(shape)) == 1 for shape in decode)


@SYNC_ASYNC
def test_accepted_tokens_are_counted_exactly(config: Any, is_async: bool) -> None:
    config.scheduler_config.async_scheduling = is_async
    engine = add_group(drafting(config))
    engine.run()
    counted = engine.counts.read()
    assert counted["version_accepted"] == engine.executor.num_accepted > 30
    assert counted["version_drafted"] > counted["version_accepted"]
    assert counted["accepted"]["siblings"] > 0
    assert counted["skipped"] == {}


@SYNC_ASYNC
def test_each_step_is_timed_by_itself(config: Any, is_async: bool) -> None:
    """Drafts change the number of tokens, so a time of the step before would be wrong."""
    config.scheduler_config.async_scheduling = is_async
    engine = add_group(drafting(config))
    engine.run()
    times = engine.drafts.controller.times
    assert len({verified for verified, _ in times}) > 5
    for verified, seconds in times:
        assert seconds == pytest.approx(step_seconds(verified))


def test_preempted_requests_continue_with_the_same_text(config: Any) -> None:
    small, large = add_group(drafting(config, num_blocks=14)), add_group(plain(config))
    assert small.run() == large.run()
    assert small.executor.preempted
    assert small.drafts.num_rows == 0


def test_aborted_requests_release_their_slots_and_leave_the_others_alone(config: Any) -> None:
    engine, without = add_group(drafting(config)), add_group(plain(config))
    engine.core.abort_requests(["r1", "r3"])
    engine.run()
    texts = without.run()
    for name in ("r0", "r2", "r4"):
        assert engine.texts[name] == texts[name]
    assert engine.drafts.num_rows == 0


class Recording(ReferenceStore):
    """Tokens of each slot that was begun and ended, in order of the ends."""

    def __init__(self) -> None:
        super().__init__(max_bytes=2**22, max_draft_tokens=lookup_length(LONGEST))
        self.running: dict[int, list[int]] = {}
        self.ended: list[list[int]] = []

    def begin(self, group: bytes, prompt: Int32Array) -> int:
        slot = super().begin(group, prompt)
        self.running[slot] = []
        return slot

    def end(self, slot: int, *, keep: bool) -> None:
        super().end(slot, keep=keep)
        self.ended.append(self.running.pop(slot))

    def step(
        self, slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
    ) -> DraftBatch:
        for slot, new in zip(slots, np.split(tokens, np.cumsum(counts)[:-1]), strict=True):
            self.running[int(slot)] += new.tolist()
        return super().step(slots, counts, tokens, limits)


@SYNC_ASYNC
def test_every_text_is_stored_once(config: Any, is_async: bool) -> None:
    """Also that of aborted requests, and of those that are in a further step when they finish."""
    config.scheduler_config.async_scheduling = is_async
    engine, kept = Engine(config, text_model()), Recording()
    engine.draft_with(kept, Uniform())
    add_group(engine)
    engine.core.abort_requests(["r1", "r3"])
    texts = engine.run()
    assert kept.running == {}
    assert sorted(kept.ended) == sorted(texts.values())


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"seed": 3}, "seeded"),
        ({"extra_args": {NO_DRAFTS_ARG: True}}, "disabled"),
    ],
)
def test_excluded_requests_verify_nothing(config: Any, params: dict[str, Any], reason: str) -> None:
    engine = add_group(drafting(config), 3, **params)
    engine.run()
    assert {tokens for shape in engine.executor.shapes for tokens in shape} == {1, len(PROMPT)}
    assert engine.counts.read()["skipped"] == {reason: 3}


def test_requests_with_a_grammar_verify_nothing(config: Any) -> None:
    engine = drafting(config)
    engine.add("r0", PROMPT)
    [request] = engine.scheduler.requests.values()
    request.structured_output_request = object()
    assert engine.drafts._tracked(request).skip_reason == "disabled"


def test_finished_texts_are_drafts_of_later_samples(config: Any) -> None:
    engine = add_group(drafting(config), 1, tokens=30)
    engine.run()
    before = len(engine.executor.shapes)
    engine.add("later", PROMPT, tokens=30, extra_args={})
    engine.run()
    assert len(engine.executor.shapes) - before < 20
    assert engine.counts.read()["accepted"]["prompt"] > 5


def test_failure_costs_only_the_drafts(config: Any) -> None:
    class Failing(ReferenceStore):
        num_steps = 0

        def step(self, *args: Any) -> Any:
            self.num_steps += 1
            if self.num_steps > 20:
                raise InvalidCall("broken")
            return super().step(*args)

    engine, without = Engine(config, text_model()), add_group(plain(config))
    engine.draft_with(Failing(max_bytes=2**22, max_draft_tokens=lookup_length(LONGEST)), Uniform())
    add_group(engine)
    assert engine.run() == without.run()
    assert engine.counts.read()["skipped"]["failed"] > 5
    assert set(engine.executor.shapes[-1]) == {1}


def test_positions_without_drafts_are_tokens_of_the_vocabulary(config: Any) -> None:
    """A hook that fails after positions were reserved must not send placeholders to the GPU."""
    engine, without = drafting(config), add_group(plain(config))
    engine.drafts.after_schedule = lambda output: None
    add_group(engine)
    assert engine.run() == without.run()


def test_positions_reserved_before_a_pause_are_not_verified_after_it(config: Any) -> None:
    engine = add_group(drafting(config), 2)
    while not any(request.spec_token_ids for request in engine.scheduler.running):
        engine.drafts.before_schedule()
        engine.step()
        engine.drafts.before_schedule()  # as if the scheduler had been paused then
    engine.drafts.is_enabled = False
    engine.drafts.before_schedule()
    assert not any(request.spec_token_ids for request in engine.scheduler.running)


def test_steps_are_not_recorded_while_nothing_is_drafted_for_good(config: Any) -> None:
    engine, without = drafting(config), add_group(plain(config))
    engine.drafts.is_enabled = False
    add_group(engine)
    assert engine.run() == without.run()
    assert engine.drafts.controller.times == []
    assert engine.drafts.store.num_tokens == engine.drafts.num_rows == 0


def test_changed_weights_age_the_store(config: Any) -> None:
    engine = add_group(drafting(config), 2)
    engine.run()
    assert engine.counts.read()["version_drafted"] > 0
    engine.core._weight_version = "1"
    engine.drafts.before_schedule()
    assert engine.counts.read()["version_drafted"] == 0


def test_profile_measures_every_length_and_leaves_no_text(config: Any) -> None:
    engine = drafting(config)
    engine.drafts.profile = profile = Profile(LONGEST)
    for row in range(2):
        engine.add(f"r{row}", PROMPT, tokens=60)
    engine.run()
    steps = profile.steps()
    assert {step.verified for step in steps if step.running == 2} == {2, 4, 6, 10}
    for step in steps:
        assert step.seconds == pytest.approx(step_seconds(step.verified))
    engine.drafts.end_profile(Uniform())
    assert engine.drafts.num_rows == 0
    assert engine.drafts.store.num_tokens == len(PROMPT)


def test_no_more_rows_than_graphs_have_are_profiled_with_drafts(config: Any) -> None:
    engine = Engine(config, text_model())
    engine.drafts = engine.draft_with(store(), Uniform(), max_samples={0: ROWS, 2: 2})
    engine.drafts.profile = Profile(LONGEST)
    add_group(engine, 3)
    engine.run()
    decode = [shape for shape in engine.executor.shapes if len(PROMPT) not in shape]
    assert {tokens for shape in decode if len(shape) == 3 for tokens in shape} == {1}
    assert {tokens for shape in decode if len(shape) < 3 for tokens in shape} == {1, 3}
