"""Subclass of vLLM's StandaloneARSpeculator: draft model passes in CUDA graphs.

The drafts are those of vLLM's `StandaloneARSpeculator`, which has no graphs.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import (
    StandaloneARSpeculator,
    prepare_prefill_inputs,
)
from vllm.v1.worker.utils import get_uniform_decode_token_count

from engine.cudagraphs.plan_from_environment import graph_plan
from engine.drafter.worker.draft_graphs import (
    CORRECTION_TOKENS,
    DraftGraphManager,
    first_pass_shapes,
    graph_mode,
    later_pass_shapes,
)


class DraftPasses(StandaloneARSpeculator):  # type: ignore[misc]
    """vLLM's speculator for a separate draft model, with its passes as single calls and graphs."""

    first_pass_graphs: DraftGraphManager | None = None
    later_pass_graphs: DraftGraphManager | None = None

    # Called by vLLM at start, twice if it measures the memory of graphs first.

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        plan, support = graph_plan(), self.attn_cg_support.min_cg_support
        # Some backends take more tokens than a longest draft and one more for prefill.
        self.first_pass_graphs = DraftGraphManager(
            self.vllm_config,
            self.device,
            graph_mode(cudagraph_mode, support, AttentionCGSupport.ALWAYS),
            self.num_speculative_steps + 1 + CORRECTION_TOKENS,
            None if plan is None else first_pass_shapes(plan, self.max_num_tokens),
        )
        self.later_pass_graphs = DraftGraphManager(
            self.vllm_config,
            self.device,
            graph_mode(cudagraph_mode, support, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
            1,
            None if plan is None else later_pass_shapes(plan),
        )

    def capture(self) -> None:
        # Inputs of earlier dummy runs could index beyond the captured batch.
        self.last_token_indices.zero_()
        self.idx_mapping.zero_()
        assert self.first_pass_graphs is not None and self.later_pass_graphs is not None
        self._capture(self.first_pass_graphs, self._first_pass, "first draft pass")
        if self.num_speculative_steps > 1:
            self._capture(self.later_pass_graphs, self._later_pass, "later draft passes")

    def _capture(self, graphs: DraftGraphManager, run_pass: Callable[..., None], name: str) -> None:
        if graphs.needs_capture():
            graphs.capture(
                run_pass,
                self.model_state,
                self.input_buffers,
                self.block_tables,
                self.attn_groups,
                self.kv_cache_config,
                progress_bar_desc=f"Capturing CUDA graphs of the {name}",
            )

    # First pass.

    def _run_first_pass(
        self, batch: Any, num_rejected: torch.Tensor, last_sampled: torch.Tensor
    ) -> None:
        total = prepare_prefill_inputs(
            input_buffers=self.input_buffers,
            input_batch=batch,
            last_sampled=last_sampled,
            num_rejected=num_rejected,
            expanded_input_ids=self.expanded_input_ids,
            expanded_positions=self.expanded_positions,
            last_token_indices=self.last_token_indices,
            max_num_reqs=self.max_num_reqs,
            max_model_len=self.max_model_len,
        )
        desc = self._first_pass_graph(batch, total)
        is_full = desc.cg_mode == CUDAGraphMode.FULL
        slots = self.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            self.input_buffers.query_start_loc[: batch.num_reqs + 1],
            self.expanded_positions[:total],
            desc.num_tokens,
            out=None if is_full else self.expanded_slot_mappings,
        )
        starts = (
            batch.query_start_loc_np[: batch.num_reqs + 1] + self.arange_np[: batch.num_reqs + 1]
        )
        metadata = self._first_pass_metadata(batch, desc, starts, slots)
        if is_full:
            assert self.first_pass_graphs is not None
            self.first_pass_graphs.run_fullgraph(desc)
        else:
            by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
            self._first_pass(batch.num_reqs, total, metadata, by_layer)

    def _first_pass_graph(self, batch: Any, total: int) -> BatchExecutionDescriptor:
        uniform = get_uniform_decode_token_count(
            batch.num_reqs,
            batch.num_tokens,
            int(batch.num_scheduled_tokens.max()),
            batch.decode_graph_eligible,
        )
        uniform = None if uniform is None else uniform + CORRECTION_TOKENS
        assert self.first_pass_graphs is not None
        return self.first_pass_graphs.dispatch(batch.num_reqs, total, uniform, 0)

    def _first_pass_metadata(
        self, batch: Any, desc: BatchExecutionDescriptor, starts: Any, slots: torch.Tensor
    ) -> Any:
        """Attention metadata; vLLM's builders also fill the buffers that a graph reads."""
        return self._build_attn_metadata(
            num_reqs=batch.num_reqs,
            batch_desc=desc,
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=CORRECTION_TOKENS,
            slot_mappings=slots,
        )

    def _first_pass(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: torch.Tensor | None = None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """The first pass of the draft model, with the arguments of vLLM's graph capture."""
        hidden_states = self._run_model(
            self.expanded_input_ids[:num_tokens],
            self.expanded_positions[:num_tokens],
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
        )
        last = self.last_token_indices[:num_reqs]
        self._sample(num_reqs, hidden_states[last], self.expanded_positions[last])

    def _sample(
        self, num_reqs: int, hidden_states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Sample the next draft token of each row, and store it in the column of this pass."""
        tokens: torch.Tensor = self.sample_draft(
            hidden_states,
            positions,
            self.idx_mapping[:num_reqs],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )
        column = self.current_draft_step.expand(num_reqs, 1)
        self.draft_tokens[:num_reqs].scatter_(1, column, tokens[:, None])
        return tokens

    # Later passes.

    def _prepare_later_passes(self, batch: Any, num_rejected: torch.Tensor) -> None:
        """Write the inputs of the second pass: the first draft token of each row."""
        num_reqs, buffers, longest = batch.num_reqs, self.input_buffers, self.max_model_len
        last = self.expanded_positions[self.last_token_indices[:num_reqs]]
        lens = batch.seq_lens[:num_reqs] - num_rejected[:num_reqs].int()
        buffers.input_ids[:num_reqs] = self.draft_tokens[:num_reqs, 0].int()
        buffers.positions[:num_reqs] = torch.clamp(last + 1, max=longest - 1)
        buffers.seq_lens[:num_reqs] = torch.clamp(lens + 1 + CORRECTION_TOKENS, max=longest)
        buffers.seq_lens[num_reqs:] = 0
        torch.clamp(self.arange_gpu, max=num_reqs, out=buffers.query_start_loc)
        self.current_draft_step.fill_(1)

    def _run_later_passes(self, batch: Any, length: int) -> None:
        assert self.later_pass_graphs is not None
        num_reqs = batch.num_reqs
        desc = self.later_pass_graphs.dispatch(num_reqs, num_reqs, 1, 0)
        updates_metadata = self.supports_decode_metadata_update
        if desc.cg_mode == CUDAGraphMode.FULL and updates_metadata:
            self._map_block_tables()
        for step in range(1, length):
            if desc.cg_mode == CUDAGraphMode.FULL and updates_metadata:
                self.later_pass_graphs.run_fullgraph(desc)
                continue
            metadata, slots = self._later_pass_metadata(batch, desc, step)
            if desc.cg_mode == CUDAGraphMode.FULL:
                self.later_pass_graphs.run_fullgraph(desc)
            else:
                self._run_later_pass(num_reqs, num_reqs, metadata, slots)

    def _map_block_tables(self) -> None:
        """Write the tables that a graph reads where a backend has blocks of another size."""
        for groups in self.attn_groups:
            for group in groups:
                group.map_to_kernel_block_table(
                    self.block_tables.input_block_tables[group.kv_cache_group_id]
                )

    def _later_pass_metadata(
        self, batch: Any, desc: BatchExecutionDescriptor, step: int
    ) -> tuple[Any, Any]:
        slots = self._later_pass_slots(desc.num_reqs or batch.num_reqs, desc.num_tokens)
        metadata = self._build_uniform_attn_metadata(
            batch_desc=desc,
            num_reqs=batch.num_reqs,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=step + CORRECTION_TOKENS,
        )
        return metadata, build_slot_mappings_by_layer(slots, self.kv_cache_config)

    def _later_pass_slots(self, num_reqs: int, num_tokens: int) -> Any:
        """Slots of the pass; padded rows have the index -1, and no slot."""
        return self.block_tables.compute_slot_mappings(
            self.idx_mapping[:num_reqs],
            self.input_buffers.query_start_loc[: num_reqs + 1],
            self.input_buffers.positions[:num_reqs],
            num_tokens,
        )

    def _later_pass(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: torch.Tensor | None = None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        num_speculative_steps: int = 0,
    ) -> None:
        """Contents of the graph of a later pass, with the arguments of vLLM's graph capture.

        Where the backend can update its metadata in place, the graph does it.
        """
        if self.supports_decode_metadata_update:
            self._later_pass_slots(num_reqs, num_tokens)
            self._update_draft_decode_metadata(attn_metadata, num_reqs)
        self._run_later_pass(num_reqs, num_tokens, attn_metadata, slot_mappings)

    def _run_later_pass(
        self, num_reqs: int, num_tokens: int, attn_metadata: Any, slot_mappings: Any
    ) -> None:
        """One pass with one token per row, which also advances the inputs to the next pass."""
        buffers, longest = self.input_buffers, self.max_model_len
        positions, seq_lens = buffers.positions[:num_reqs], buffers.seq_lens[:num_reqs]
        hidden_states = self._run_model(
            buffers.input_ids[:num_tokens],
            buffers.positions[:num_tokens],
            attn_metadata,
            slot_mappings,
            None,
        )
        tokens = self._sample(num_reqs, hidden_states[:num_reqs], positions)
        buffers.input_ids[:num_reqs] = tokens.int()
        torch.clamp(positions + 1, max=longest - 1, out=positions)
        torch.clamp(seq_lens + 1, max=longest, out=seq_lens)
        # Bounded, because the warm-up of a capture runs it without a step's first pass.
        last_column = self.num_speculative_steps - 1
        torch.clamp(self.current_draft_step + 1, max=last_column, out=self.current_draft_step)
