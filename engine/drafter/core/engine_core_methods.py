"""Methods added to vLLM's EngineCore for the draft model: start, profile, change of version."""

import hashlib
from typing import TYPE_CHECKING, Any

from engine.cudagraphs.plan_from_environment import graph_plan
from engine.drafter.acceptance_by_version import Snapshot
from engine.drafter.core.scheduler_hooks import DraftingHooks
from engine.runtime.process_environment import cache_directory
from engine.speculation.baseline import cost_model, profile_key
from engine.speculation.controller import Controller
from engine.speculation.cost import ProfileCache, Step

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def coppice_start_drafting(self: "EngineCore", serving: str) -> bool:
    """Start choosing draft lengths, and return whether step times must be profiled first."""
    profile = self.coppice_profile = drafter_profile(self)
    steps, plan = profile.read(), graph_plan()
    drafting = DraftingHooks(
        self.scheduler,
        max_draft_tokens=self.vllm_config.num_speculative_tokens,
        serving=serving,
        weights=self.get_weight_version,
        controller=_controller(self, steps or []),
        max_samples=None if plan is None else plan.max_samples,
    )
    drafting.attach()
    self.coppice_drafting = drafting
    self.coppice_count_drafts = drafting.speculation
    if steps is None:
        drafting.length.begin_profile()
    return steps is None


def coppice_finish_drafter_profile(self: "EngineCore") -> None:
    length = _drafting(self).length
    assert length.profile is not None, "a profile is being measured"
    steps = length.profile.steps()
    if steps:
        drafter_profile(self).write(steps)
    length.end_profile(_controller(self, steps))


def coppice_set_drafter(
    self: "EngineCore", path: str, previous: str, version: str, on_trial: bool
) -> list[Any]:
    """Load a drafter version in all workers, and return the result of each worker.

    If any worker fails, the previous drafter stays in use.
    """
    answers = self.model_executor.collective_rpc("coppice_load_drafter", args=(path, previous))
    if all(answer["ok"] for answer in answers):
        _drafting(self).set_drafter(version, on_trial=on_trial)
    return list(answers)


def counted(core: "EngineCore") -> Snapshot | None:
    drafting: DraftingHooks | None = getattr(core, "coppice_drafting", None)
    return None if drafting is None else drafting.read()


METHODS = (coppice_start_drafting, coppice_finish_drafter_profile, coppice_set_drafter)


def _drafting(core: "EngineCore") -> DraftingHooks:
    drafting: DraftingHooks = core.coppice_drafting
    return drafting


def _controller(core: "EngineCore", steps: list[Step]) -> Controller:
    return Controller(cost_model(core.vllm_config, steps))


def drafter_profile(core: "EngineCore") -> ProfileCache:
    """Cached step times of this engine with its draft model."""
    config = core.vllm_config
    drafter = config.speculative_config.draft_model_config.hf_config.to_json_string().encode()
    return ProfileCache(
        cache_directory("speculation"),
        profile_key(config) | {"drafter": hashlib.sha256(drafter).hexdigest()},
    )
