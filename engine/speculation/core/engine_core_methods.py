"""Methods added to vLLM's EngineCore: start and timing of drafts made from a group's samples."""

from typing import TYPE_CHECKING

from engine.cudagraphs.plan_from_environment import graph_plan
from engine.speculation.baseline import cost_model, may_speed_up, profile_cache
from engine.speculation.calibration import DraftCalibration
from engine.speculation.core.scheduler_drafts import SchedulerDrafts
from engine.speculation.core.uniform_length import UniformController
from engine.speculation.cost import Profile, Step, draft_lengths
from engine.speculation.counters import COUNTERS, Snapshot
from engine.speculation.draft_message import lookup_length
from engine.speculation.drafting_base import STORE_BYTES
from kernels.draft_index.compiled_store import DraftStore

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def coppice_start_sibling_drafts(self: "EngineCore") -> bool:
    """Start drafting, and return whether step times must be profiled first."""
    config, longest = self.vllm_config, self.vllm_config.num_speculative_tokens
    assert config.use_v2_model_runner, "the start was refused otherwise"
    steps = profile_cache(config).read()
    drafts = SchedulerDrafts(
        self.scheduler,
        DraftStore(max_bytes=STORE_BYTES, max_draft_tokens=lookup_length(longest)),
        _controller(self, steps or []),
        COUNTERS,
        max_draft_tokens=longest,
        max_samples=_max_samples(self),
        weights=self.get_weight_version,
    )
    drafts.attach()
    self.coppice_sibling_drafts = drafts
    self.coppice_count_drafts = COUNTERS.read
    if steps is None:
        drafts.profile = Profile(longest)
    else:
        drafts.is_enabled = may_speed_up(steps, config)
    return steps is None


def coppice_finish_sibling_profile(self: "EngineCore") -> None:
    drafts: SchedulerDrafts = self.coppice_sibling_drafts
    assert drafts.profile is not None, "a profile is being measured"
    steps = drafts.profile.steps()
    if steps:
        profile_cache(self.vllm_config).write(steps)
    drafts.is_enabled = may_speed_up(steps, self.vllm_config)
    drafts.end_profile(_controller(self, steps))


def counted(core: "EngineCore") -> Snapshot | None:
    """Counters of the drafts that this process makes, if it makes any, by siblings or a model."""
    count = getattr(core, "coppice_count_drafts", None)
    return None if count is None else count()


METHODS = (
    coppice_start_sibling_drafts,
    coppice_finish_sibling_profile,
)


def _controller(core: "EngineCore", steps: list[Step]) -> UniformController:
    cost = cost_model(core.vllm_config, steps)
    return UniformController(_max_samples(core), cost, DraftCalibration())


def _max_samples(core: "EngineCore") -> dict[int, int]:
    """Number of rows that may use each draft length: those that vLLM captures graphs for."""
    plan = graph_plan()
    if plan is not None:
        return plan.max_samples
    rows = core.vllm_config.scheduler_config.max_num_seqs
    return dict.fromkeys(draft_lengths(core.vllm_config.num_speculative_tokens), rows)
