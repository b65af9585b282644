"""P1 and P2 against a model: rollouts under random interleavings of all events.

Each step takes one or two iterations of the event loop, so that the next step interrupts the
previous one; the engine yields at every call for the same reason. At the end the accounts must
balance.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.wire.rollouts import GroupAnswer, RolloutAnswer, RolloutRequest
from coppice.wire.weights import ActivationMode
from engine.types.samples import PauseMode
from service.cluster.idempotency_claim import IdempotencyClaim
from service.errors import ServiceError
from service.rollouts.groups.group import Group
from service.rollouts.request import NewRollout
from service.rollouts.rollout import Rollout
from service.server import Server
from service.weights_versions import Version
from tests.invariants.yielding_engine import YieldingEngine, yield_loop
from tests.sample_sizes import num_examples
from tests.service.test_rollouts import body, group
from tests.serving import settings_for

pytestmark = pytest.mark.slow

KEYS = ("a", "b")
VERSIONS = ("v1", "v2")
# Splits at the prompt, and again two tokens later.
TREE = group(*range(1, 32))
BRANCHING = {"mode": "interval", "interval": 1, "max_depth": 2, "max_leaves": 4}


@dataclass
class Observed:
    """One caller's view: the rollout ID it received, and its answer or problem."""

    rollout: Rollout | None = None
    groups: Sequence[Group] = ()
    answer: RolloutAnswer | None = None
    problem: ServiceError | None = None


@dataclass
class World:
    server: Server
    engine: YieldingEngine
    callers: list[tuple["asyncio.Task[None]", Observed]] = field(default_factory=list)
    others: list["asyncio.Task[Any]"] = field(default_factory=list)

    def ask(
        self, num_groups: int, n: int, key: str | None, detached: bool, weights: Any, grown: bool
    ) -> None:
        seen = Observed()
        asked = body(*[TREE if grown else group(1, n=n)] * num_groups, weights=weights)
        branching = BRANCHING if grown else None
        request = RolloutRequest.model_validate({**asked, "branching": branching})
        claim = None if key is None else IdempotencyClaim.of("local", key, repr(request).encode())
        call = self._call(request, claim, detached, seen)
        self.callers.append((asyncio.create_task(call), seen))

    async def _call(
        self,
        request: RolloutRequest,
        claim: IdempotencyClaim | None,
        detached: bool,
        seen: Observed,
    ) -> None:
        """Calls the manager as the route does."""
        rollouts = self.server.rollouts
        try:
            seen.rollout = await rollouts.start(
                NewRollout.of(request, owner="local", can_move=False),
                detached=detached,
                claim=claim,
            )
            seen.groups = seen.rollout.groups  # an ended rollout drops them
            try:
                seen.answer = await seen.rollout.answer()
            finally:
                rollouts.on_disconnect(seen.rollout)
        except ServiceError as problem:
            seen.problem = problem

    def meanwhile(self, work: Coroutine[Any, Any, Any]) -> None:
        self.others.append(asyncio.create_task(self.server.run_to_completion(work)))


Step = tuple[str, Any]
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(
        st.just("ask"),
        st.tuples(
            st.integers(1, 3),
            st.integers(1, 3),
            st.sampled_from([None, None, *KEYS]),
            st.booleans(),
            st.sampled_from([None, {"exact_version": "v0"}, {"min_version": "v1"}]),
            st.booleans(),
        ),
    ),
    st.tuples(st.just("sample"), st.integers(1, 4)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.integers(0, 9)),
    st.tuples(
        st.just("activate"),
        st.tuples(
            st.sampled_from(VERSIONS), st.sampled_from(["keep", "recompute", "wait", "abort"])
        ),
    ),
    st.tuples(st.just("pause"), st.sampled_from(["keep", "abort"])),
    st.tuples(st.just("resume"), st.none()),
    st.tuples(st.just("refuse"), st.none()),
    st.tuples(st.just("die"), st.sampled_from([False] * 9 + [True])),
)


def take(world: World, name: str, given: Any) -> None:
    server, engine = world.server, world.engine
    match name:
        case "ask":
            world.ask(*given)
        case "sample":
            engine.step(given)
        case "leave" if given < len(world.callers):
            world.callers[given][0].cancel()
        case "delete" if given < len(world.callers):
            rollout = world.callers[given][1].rollout
            if rollout is not None:
                world.meanwhile(server.rollouts.cancel(rollout))
        case "activate":
            label: str
            mode: ActivationMode
            label, mode = given
            world.meanwhile(server.activation.apply(label, mode, allow_rollback=True))
        case "pause":
            pause: PauseMode = given
            world.meanwhile(server.activation.pauses.pause("local", pause, 60.0))
        case "resume":
            world.meanwhile(server.activation.pauses.resume("local"))
        case "refuse":
            engine.num_rejections = 1
        case "die" if given:
            engine.die()


async def settle(world: World) -> None:
    """Runs until no task waits any more; fails on a deadlock.

    Aborted rollouts must end while no token is sampled.
    """
    await yield_loop(50)
    for _, seen in world.callers:
        if seen.rollout is not None and not seen.rollout.ended:
            assert {g.end_reason for g in seen.rollout.groups} != {"cancelled"}
    async with asyncio.timeout(20):
        tasks = [task for task, _ in world.callers] + world.others
        while not all(task.done() for task in tasks) or world.server.rollouts.num_running:
            world.engine.step(4)
            if world.server.activation.pauses.paused:
                await world.server.activation.pauses.resume("local")
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)


async def live(steps: list[tuple[Step, int]], folder: Path) -> None:
    engine = YieldingEngine(instant=False)
    server = Server(settings_for(folder), engine)
    async with server.running():
        await asyncio.sleep(0)
        for sequence, label in enumerate(VERSIONS, start=1):
            server.versions.put(_staged(label, sequence, folder))
        world = World(server, engine)
        for (name, given), num_turns in steps:
            take(world, name, given)
            await yield_loop(num_turns)
        await settle(world)
        check(world)
    assert not engine.running


def check(world: World) -> None:
    """Asserts that everything ended once, with the same outcome in every account."""
    server = world.server
    started = {seen.rollout.id: seen.rollout for _, seen in world.callers if seen.rollout}
    groups = {
        seen.rollout.id: seen.groups for _, seen in world.callers if seen.rollout and seen.groups
    }
    ended = [rollout for rollout in started.values() if rollout.ended]
    assert len(ended) == len(started) == len(groups)
    assert not world.engine.running, "a sample outlived its group"
    assert server.admission.num_samples == 0
    server.admission.check()
    server.rollouts.check()
    for task, seen in world.callers:
        assert task.cancelled() or (seen.answer is None) != (seen.problem is None)
    for rollout in ended:
        if rollout.error is None:
            pairs = zip(groups[rollout.id], rollout.answers(), strict=True)
            assert all(_is_complete(group_, answer) for group_, answer in pairs)
        _check_versions(groups[rollout.id], rollout.answers())
    outcomes = Counter(answer.outcome for r in ended for answer in r.answers())
    outcomes["failed"] += sum(len(groups[r.id]) - len(r.answers()) for r in ended)
    assert {k: v for k, v in outcomes.items() if v} == _counted(server)
    _check_keys(world, ended)


def _is_complete(group_: Group, answer: GroupAnswer) -> bool:
    """A tree without interruption has all its leaves; the counts of any other are consistent."""
    if answer.segments is None:
        return len(answer.samples) == group_.options.n
    for segment in answer.segments:
        assert segment.parent is None or segment.num_leaves
    return answer.num_samples == group_.options.n or answer.outcome in ("partial", "cancelled")


def _check_versions(groups: Sequence[Group], answers: Sequence[GroupAnswer]) -> None:
    for group_, answer in zip(groups, answers, strict=False):
        for part in [*answer.samples, *(answer.segments or ())]:
            spans = part.versions
            assert sum(span.end - span.start for span in spans) == len(part.token_ids)
            if group_.options.exact_version is not None:
                assert {span.version for span in spans} <= {group_.options.exact_version}


def _check_keys(world: World, ended: list[Rollout]) -> None:
    """P2: of requests with the same content and key, at most one rollout is answered."""
    answered = Counter(claim for r in ended if r.error is None for claim in r.claims)
    assert all(number == 1 for number in answered.values())


def _counted(server: Server) -> dict[str, int]:
    (metric,) = server.metrics.rollouts.groups.collect()
    totals = {s.labels["outcome"]: int(s.value) for s in metric.samples if s.name.endswith("total")}
    return {outcome: count for outcome, count in totals.items() if count}


def _staged(label: str, sequence: int, folder: Path) -> Version:
    return Version(
        label=label, sequence=sequence, state="staged", path=folder, num_bytes=0, owned=True
    )


@settings(max_examples=num_examples(300), deadline=None)
@given(st.lists(st.tuples(STEPS, st.integers(0, 6)), min_size=3, max_size=30))
def test_every_group_ends_once_under_any_interleaving(
    tmp_path_factory: Any, steps: list[tuple[Step, int]]
) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / uuid.uuid4().hex
    asyncio.run(live(steps, folder))
