"""Groups of samples after a system prompt, sampled by a live engine."""

from typing import Any

from tests.engine.attention.shared_engine import SharedEngine
from tests.engine.greedy import assert_greedy
from tests.engine.stepped_engine import Answer

SYSTEM = [*range(30, 30 + 70)]
GROUPS = [[*SYSTEM, *range(200 + 40 * g, 200 + 40 * g + 35 * (g % 3))] for g in range(4)]
ALONE = [9, 8, 7]
GROUP_SIZE = 4


def sample(
    engine: SharedEngine, num_tokens: int, **sampling: Any
) -> list[tuple[list[int], Answer]]:
    """Samples groups that arrive one after another.

    Later prompts prefill alongside earlier samples.
    """
    live = engine.live
    prompts = [prompt for prompt in GROUPS for _ in range(GROUP_SIZE)]
    names = []
    for number, prompt in enumerate([*prompts, ALONE]):
        seed = {"seed": number} if sampling.get("temperature") else {}
        names.append(live.submit(prompt, max_tokens=num_tokens, **(sampling | seed)))
        if number % GROUP_SIZE == 1:
            live.step(2)
    return list(zip([*prompts, ALONE], live.finish(*names), strict=True))


def assert_all_greedy(reference: Any, answers: list[tuple[list[int], Answer]]) -> None:
    for prompt, answer in answers:
        assert_greedy(reference, prompt, answer.token_ids)


class StepKinds:
    """Records which kinds of step were grouped, by wrapping the builder."""

    def __init__(self, engine: SharedEngine) -> None:
        self.mixed = self.levels = self.preempted = self.drafted = False
        group_rows, scheduler = engine.builder.grouper.group_rows, engine.live.core.scheduler

        def seen(table: Any, lens: Any, starts: Any) -> Any:
            grouping = group_rows(table, lens, starts)
            if grouping is not None:
                self.mixed |= grouping.num_rows < len(lens)
                self.levels |= len(grouping.plan.node_rows) > len(set(grouping.plan.node_rows))
                self.drafted |= grouping.num_tokens > grouping.num_rows
                self.preempted |= any(r.num_preemptions for r in scheduler.running)
            return grouping

        engine.builder.grouper.group_rows = seen
