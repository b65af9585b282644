"""Draft proposer class for vLLM's speculative method `custom_class` (CPU, first rank).

vLLM constructs it with the engine and passes it neither requests nor the model runner, so a worker
RPC attaches it to the runner afterwards. Before that, and after its first error, it returns empty
drafts, which are always valid.
"""

from collections.abc import Collection, Sequence
from typing import Any

from engine.runtime.feature_guard import feature
from engine.speculation.baseline import cost_model, may_speed_up, profile_cache
from engine.speculation.calibration import DraftCalibration
from engine.speculation.controller import Controller
from engine.speculation.cost import Profile, Step
from engine.speculation.counters import COUNTERS
from engine.speculation.cpu_speculator import Speculator, TokenLists
from engine.speculation.draft_verification import DraftStepSkipper, DraftVerifier
from engine.speculation.drafting_base import STORE_BYTES
from kernels.draft_index.compiled_store import DraftStore
from kernels.draft_index.store_protocol import Int32Array

FEATURE = feature("speculation")


class Proposer:
    """Draft proposer with the interface that vLLM calls, which delegates to a `Speculator`."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._max_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._profile_cache = profile_cache(vllm_config)
        self.speculator: Speculator | None = None
        self.is_enabled = True

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no draft model, but vLLM calls this on CPU."""

    def install(self, runner: Any) -> None:
        """Install `DraftVerifier` and `DraftStepSkipper` in the model runner, on every rank."""
        runner.rejection_sampler = DraftVerifier(runner.rejection_sampler)
        # The state of recurrent layers is laid out differently in steps without a draft method.
        if not runner.model_config.is_hybrid:
            DraftStepSkipper(runner, self)

    def attach(self, runner: Any) -> None:
        """Attach the proposer to the model runner, which maps batch rows to requests."""
        steps = self._profile_cache.read() or []
        self.is_enabled = not steps or may_speed_up(steps, self._config)
        self.speculator = Speculator(
            runner,
            DraftStore(max_bytes=STORE_BYTES, max_draft_tokens=self._max_draft_tokens),
            self._controller(steps),
            COUNTERS,
            max_draft_tokens=self._max_draft_tokens,
        )

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens: Int32Array,
        token_ids: Int32Array,
        slot_mappings: Any = None,
    ) -> TokenLists:
        if self.speculator is None or not self.is_enabled:
            return [[] for _ in sampled_token_ids]
        return self._propose(sampled_token_ids, num_tokens, token_ids)

    def _no_drafts(
        self, sampled: Sequence[Sequence[int]], num_tokens: Int32Array, token_ids: Int32Array
    ) -> TokenLists:
        COUNTERS.record_skipped("failed")
        return [[] for _ in sampled]

    @FEATURE.guarded(_no_drafts)
    def _propose(
        self, sampled: Sequence[Sequence[int]], num_tokens: Int32Array, token_ids: Int32Array
    ) -> TokenLists:
        assert self.speculator is not None, "attached to the model runner"
        return self.speculator.drafts(sampled, num_tokens, token_ids)

    @FEATURE.guarded_with_default(None)
    def end(self, ended: Collection[str]) -> None:
        """Store the remaining tokens of requests that the runner is about to drop."""
        if self.speculator is not None and self.is_enabled:
            self.speculator.end(ended)

    # Called by the worker between two steps.

    def begin_profile(self) -> bool:
        """Start measuring step times if none are cached; returns True if they are measured."""
        if self.speculator is None or self._profile_cache.read() is not None:
            return False
        self.speculator.profile = Profile(self._max_draft_tokens)
        return True

    def end_profile(self) -> None:
        assert self.speculator is not None and self.speculator.profile is not None
        steps = self.speculator.profile.steps()
        if steps:
            self._profile_cache.write(steps)
        self.is_enabled = may_speed_up(steps, self._config)
        self.speculator.end_profile(self._controller(steps))

    def _controller(self, steps: Sequence[Step]) -> Controller:
        return Controller(cost_model(self._config, steps), DraftCalibration())

    def on_weights_changed(self) -> None:
        if self.speculator is not None:
            self.speculator.on_weights_changed()
