"""Subclass of vLLM's KV connector, for export and load of prompt KV (EngineCore and workers).

It forwards vLLM's calls to the scheduler and worker sides, guarded. Blocks of a prompt are held
until it is exported or not; the status in the arena says which. KV is loaded before the
step's forward pass. Blocks that could not be filled are reported, and vLLM prefills them.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from engine.kv_transfer.cache_layout import CacheLayout, UnsupportedCache, cache_layouts
from engine.kv_transfer.core.export_planner import ExportPlanner, HeldBlocks
from engine.kv_transfer.core.load_planner import LoadPlanner
from engine.kv_transfer.jobs import EndedExports, PromptExport, StepJobs
from engine.kv_transfer.worker.export_writer import EXPORT_FEATURE
from engine.kv_transfer.worker.loader import LOAD_FEATURE, Loader
from engine.kv_transfer.worker.multi_layout_writer import PromptWriter
from engine.runtime.feature_guard import Failure, attempt
from engine.types.kv import KvTransferParams

_NOT_DELAYED: Final = (False, None)
_NO_EXPORTS: Final[tuple[PromptExport, ...]] = ()
_NO_MATCH: Final[tuple[int | None, bool]] = (0, False)


class PromptKvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM KV connector that exports and loads prompt KV.

    If `unsupported_reason` is set, the model's prompts cannot be exported, and it does nothing.
    `can_load` is true if all layers have all tokens, in one shape.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        layouts = attempt(_try_cache_layouts, vllm_config, kv_cache_config)
        self.layouts = layouts if isinstance(layouts, tuple) else ()
        self.unsupported_reason = layouts.message if isinstance(layouts, Failure) else None
        if isinstance(layouts, str):
            self.unsupported_reason = layouts
        # vLLM prefills blocks that failed to load only if there is one KV cache group.
        self.has_one_group = len(getattr(kv_cache_config, "kv_cache_groups", ())) == 1
        self.can_load = len(self.layouts) == 1 and self.layouts[0].window is None
        self.load_planner = LoadPlanner(self.layouts[0] if self.can_load else None)
        self.export_planner = ExportPlanner(self.layouts, on_exported=self.load_planner.on_exported)
        self.held_blocks = HeldBlocks(self.layouts[0].num_ranks if self.layouts else 1)
        self.writer: PromptWriter | None = None
        self.loader: Loader | None = None
        if self.layouts and role == KVConnectorRole.WORKER:
            rank = get_tensor_model_parallel_rank()
            self.writer = PromptWriter(self.layouts, rank)
            self.loader = Loader(self.layouts[0], rank)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a preempted request prefills its prompt again."""
        return False

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.held_blocks.bind(gpu_block_pool)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.kv_connector_worker_meta is not None:
            self.held_blocks.on_ended(connector_output.kv_connector_worker_meta.num_ranks)

    def has_pending_push_work(self) -> bool:
        """True while blocks are held: their release is reported by a step."""
        return bool(self.held_blocks)

    def has_pending_block_frees(self) -> bool:
        """True if vLLM shall wait for free blocks instead of preempting a request."""
        return self.held_blocks.has_pending_frees

    @EXPORT_FEATURE.guarded_with_default(None)
    def on_new_request(self, request: Any) -> None:
        params = KvTransferParams.from_dict(request.kv_transfer_params)
        self.export_planner.add(request.request_id, params.export)
        self.load_planner.add(request, params.load)

    @LOAD_FEATURE.guarded_with_default(_NO_MATCH)
    def get_num_new_matched_tokens(
        self, request: Any, num_computed: int
    ) -> tuple[int | None, bool]:
        return self.load_planner.match(request, num_computed), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Schedule the load of matched tokens.

        Not guarded: if they were not loaded, vLLM would sample from empty blocks.
        """
        self.load_planner.on_allocated(request, blocks, num_external)

    def build_connector_meta(self, scheduler_output: Any) -> StepJobs:
        return StepJobs(
            exports=self._plan_exports(scheduler_output), loads=self.load_planner.take_jobs()
        )

    @EXPORT_FEATURE.guarded_with_default(_NO_EXPORTS)
    def _plan_exports(self, scheduler_output: Any) -> tuple[PromptExport, ...]:
        exports = self.export_planner.plan(scheduler_output)
        return tuple(self.held_blocks.hold(export) for export in exports)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self.load_planner.forget(request.request_id)
        return self._on_finished(request)

    @EXPORT_FEATURE.guarded_with_default(_NOT_DELAYED)
    def _on_finished(self, request: Any) -> tuple[bool, None]:
        self.export_planner.forget(request.request_id)
        return _NOT_DELAYED

    def reset_cache(self) -> None:
        """Forget the exports of the old weights. Called when the prefix cache is reset.

        Not guarded: it cannot fail, and KV of the old weights must not be loaded under new ones.
        """
        self.load_planner.start_epoch()
        self.export_planner.start_epoch()

    # Worker side

    @EXPORT_FEATURE.guarded_with_default(None)
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if self.writer is not None:
            self.writer.register(kv_caches)
        if self.loader is not None:
            self.loader.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load KV into the step's blocks. Called before the forward pass."""
        if self.loader is not None and self.has_connector_metadata():
            for job in self._get_connector_metadata().loads:
                self.loader.load(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: all layers are loaded at once."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self.loader is None else self.loader.take_failed_blocks()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """No-op: all layers are copied at once when the prompt is complete."""

    def wait_for_save(self) -> None:
        """Export completed prompts. Called after the forward pass, before blocks are reused."""
        if self.writer is None or self.loader is None or not self.has_connector_metadata():
            return
        end = self.writer.fail if self.loader.take_step_failed() else self.writer.export
        for export in self._get_connector_metadata().exports:
            end(export)

    def build_connector_worker_meta(self) -> EndedExports | None:
        ended = Counter[int]() if self.writer is None else self.writer.take_ended()
        return EndedExports(num_ranks=ended) if ended else None

    @EXPORT_FEATURE.guarded_with_default(None)
    def shutdown(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.loader is not None:
            self.loader.close()


def connector_of(configured: Any) -> PromptKvConnector:
    """The connector of prompt KV among those that are configured. Raises UnsupportedCache."""
    connectors = (
        configured.sub_connectors if isinstance(configured, MultiConnector) else [configured]
    )
    for connector in connectors:
        if isinstance(connector, PromptKvConnector):
            return connector
    raise UnsupportedCache("no connector of prompt KV is configured")


def _try_cache_layouts(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheLayout, ...] | str:
    try:
        return cache_layouts(vllm_config, kv_cache_config)
    except UnsupportedCache as error:
        return str(error)
