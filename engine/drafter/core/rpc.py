"""Methods that EngineCore gains for its drafter; they run between two steps."""

import hashlib
from typing import TYPE_CHECKING, Any

from engine.drafter.core.scheduler_hooks import Drafting
from engine.drafter.counters import Counted
from engine.launch.environment import graph_plan, speculation_settings
from engine.speculation.controller import Controller
from engine.speculation.cost import StepCost
from engine.speculation.profile_cache import KeptProfile
from engine.speculation.proposer import circumstances

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def coppice_draft(self: "EngineCore", serving: str) -> bool:
    """Lengths are chosen from here on: whether a profile is to be made first."""
    steps, plan = _kept(self).read(), graph_plan()
    drafting = Drafting(
        self.scheduler,
        longest=self.vllm_config.num_speculative_tokens,
        serving=serving,
        weights=self.get_weight_version,
        controller=Controller(StepCost(steps or [])),
        most_samples=None if plan is None else plan.most_samples,
    )
    drafting.attach()
    self.coppice_drafting = drafting
    if steps is None:
        drafting.begin_profile()
    return steps is None


def coppice_drafter_profiled(self: "EngineCore") -> None:
    steps = _drafting(self).end_profile()
    if steps:
        _kept(self).keep(steps)


def coppice_serve_drafter(
    self: "EngineCore", path: str, previous: str, version: str, on_trial: bool
) -> list[Any]:
    """The workers' answers. If they could not load it, the previous one drafts on."""
    answers = self.model_executor.collective_rpc("coppice_load_drafter", args=(path, previous))
    if all(answer["ok"] for answer in answers):
        _drafting(self).serves(version, on_trial=on_trial)
    return list(answers)


def counted(core: "EngineCore") -> Counted | None:
    drafting: Drafting | None = getattr(core, "coppice_drafting", None)
    return None if drafting is None else drafting.read()


METHODS = (coppice_draft, coppice_drafter_profiled, coppice_serve_drafter)


def _drafting(core: "EngineCore") -> Drafting:
    drafting: Drafting = core.coppice_drafting
    return drafting


def _kept(core: "EngineCore") -> KeptProfile:
    config = core.vllm_config
    drafter = config.speculative_config.draft_model_config.hf_config.to_json_string().encode()
    return KeptProfile(
        speculation_settings().cache_directory,
        circumstances(config) | {"drafter": hashlib.sha256(drafter).hexdigest()},
    )
