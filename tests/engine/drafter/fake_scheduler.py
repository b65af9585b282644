"""vLLM's scheduler as drafting uses it: decode steps, on a simulated clock."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.drafter.core.scheduler_hooks import DraftingHooks
from engine.speculation.controller import Controller
from engine.speculation.cost import Step, StepCostModel

LONGEST = 4
ROWS = 8


def cheap_steps() -> list[Step]:
    """A drafted token costs a twentieth of a step."""
    return [
        Step(
            running=rows,
            context=rows * 64,
            verified=rows * (1 + drafts),
            seconds=0.01 * (1 + 0.05 * drafts),
        )
        for rows in (1, 4, 8, 16)
        for drafts in range(LONGEST + 1)
    ]


@dataclass
class Scheduler:
    """Each step verifies the drafts of the step before; `accepted` is the number accepted.

    `is_async`: a step is scheduled while the one before runs, so its time passes a step later.
    """

    is_async: bool = False
    accepted: Callable[[int], int] = lambda drafted: drafted
    seconds: Callable[[int], float] = lambda drafted: 0.01 * (1 + 0.05 * drafted)
    running: list[Any] = field(default_factory=list)
    requests: dict[str, Any] = field(default_factory=dict)
    dynamic_sd_lookup: list[int] = field(default_factory=lambda: [LONGEST] * (ROWS + 1))
    now: float = 0.0
    lengths: list[int] = field(default_factory=list)
    before: float = 0.0

    @property
    def scheduler_config(self) -> Any:
        return SimpleNamespace(async_scheduling=self.is_async)

    def add(self, name: str, *, seed: int | None = None, **named: Any) -> None:
        request = SimpleNamespace(
            request_id=name,
            num_computed_tokens=10,
            num_prompt_tokens=10,
            num_tokens=11,
            num_output_tokens=1,
            max_tokens=10**6,
            spec_token_ids=[],
            sampling_params=SimpleNamespace(
                seed=seed, min_p=0.0, min_tokens=0, logit_bias=None, extra_args=named or None
            ),
        )
        self.requests[name] = request
        self.running.append(request)

    def schedule(self) -> Any:
        length = self.dynamic_sd_lookup[len(self.running)]
        drafts = {r.request_id: r.spec_token_ids for r in self.running if r.spec_token_ids}
        tokens = {r.request_id: 1 + len(r.spec_token_ids) for r in self.running}
        for request in self.running:
            request.num_computed_tokens += tokens[request.request_id]
            request.spec_token_ids = []
        self.lengths.append(length)
        return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts)

    def make_spec_decoding_stats(self, stats: Any, **named: Any) -> Any:
        return stats

    def update_draft_token_ids(self, drafts: Any) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self.requests[name].spec_token_ids = tokens

    def step(self) -> None:
        """Runs one step as EngineCore does."""
        output = self.schedule()
        verified = max(map(len, output.scheduled_spec_decode_tokens.values()), default=0)
        seconds = self.seconds(max(verified, self.lengths[-1]))
        self.now += self.before if self.is_async else seconds
        self.before = seconds
        for request in self.running:
            drafted = output.scheduled_spec_decode_tokens.get(request.request_id, [])
            hits = min(self.accepted(len(drafted)), len(drafted))
            request.num_computed_tokens -= len(drafted) - hits
            request.num_tokens += 1 + hits
            request.num_output_tokens += 1 + hits
            if drafted:
                self.make_spec_decoding_stats(
                    None, num_draft_tokens=len(drafted), num_accepted_tokens=hits
                )
        self.update_draft_token_ids(
            SimpleNamespace(
                req_ids=list(self.requests),
                draft_token_ids=[[7] * self.lengths[-1] for _ in self.requests],
            )
        )


@dataclass
class Versions:
    weights: str = "v0"


def drafting_over(
    scheduler: Scheduler,
    versions: Versions | None = None,
    max_samples: dict[int, int] | None = None,
) -> DraftingHooks:
    versions = versions or Versions()
    drafting = DraftingHooks(
        scheduler,
        max_draft_tokens=LONGEST,
        serving="d0",
        weights=lambda: versions.weights,
        controller=Controller(StepCostModel(cheap_steps())),
        max_samples=max_samples,
        clock=lambda: scheduler.now,
    )
    drafting.attach()
    return drafting
