"""Speculator (vLLM's Model Runner V2) with a draft length that varies from step to step.

vLLM's `StandaloneARSpeculator` runs the draft model as often as the longest draft allows, in every
step and without CUDA graphs. `DraftSpeculator` runs it exactly as often as the step's draft length.
At length 0 it does not run. The tokens of such steps are missing in the draft model's KV cache;
`DraftKvLedger` records the blocks, and the first pass of the next step that drafts also computes
the missing tokens. It takes more than one pass only if they exceed the batch limit.

The drafts are those of vLLM's loop. Only passes whose drafts are not used are left out, so the
sampling distribution does not depend on this module.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from engine.drafter.worker.draft_graphs import CORRECTION_TOKENS
from engine.drafter.worker.draft_passes import DraftPasses
from engine.drafter.worker.kv_ledger import DraftKvLedger

Ints = NDArray[np.int64]
PROPOSE: Final = inspect.signature(BaseSpeculator.propose)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a batch whose tokens a pass computes.

    `states` are indices of vLLM's request states, `first` the positions of the first tokens, and
    `ends` the positions after the sampled tokens. `lens` is the number of tokens on the host.
    A row can have fewer real tokens than `lens`, because the host does not know how many drafts
    were rejected. The rest is padding.
    """

    states: torch.Tensor
    first: torch.Tensor
    ends: torch.Tensor
    lens: Ints

    @property
    def num_tokens(self) -> int:
        return int(self.lens.sum())


class DraftSpeculator(DraftPasses):
    """vLLM's speculator for a separate draft model, bounded by the draft length of each step."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device)
        self.req_states = req_states
        self.ledger: DraftKvLedger | None = None

    def set_attn(
        self, model_state: Any, kv_cache_config: Any, block_tables: Any, *more: Any
    ) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *more)
        self.ledger = self._create_ledger()
        if self.ledger is not None:
            block_tables.append_block_ids = self._recording(block_tables.append_block_ids)

    def _create_ledger(self) -> DraftKvLedger | None:
        """Ledger of the draft model's blocks; None where a block does not hold a range of tokens.

        Without a ledger the first pass runs in every step, as in vLLM's other speculators.
        """
        groups = [number for number, group in enumerate(self.attn_groups) if group]
        specs = [group.kv_cache_spec for number in groups for group in self.attn_groups[number]]
        has_one_table = len(groups) == 1 and self.block_tables.cp_size == 1
        if not has_one_table or not all(isinstance(spec, FullAttentionSpec) for spec in specs):
            return None
        self._draft_group = groups[0]
        return DraftKvLedger(
            num_blocks=self.kv_cache_config.num_blocks,
            block_size=self.block_tables.block_sizes[self._draft_group],
            table_shape=tuple(self.block_tables.block_tables[self._draft_group].gpu.shape),
            max_drafts=self.num_speculative_steps,
        )

    def _recording(self, append: Callable[..., None]) -> Callable[..., None]:
        def append_block_ids(
            req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
        ) -> None:
            append(req_index, new_block_ids, overwrite)
            assert self.ledger is not None, "set with this hook"
            blocks = new_block_ids[self._draft_group]
            self.ledger.append_blocks(req_index, blocks, overwrite=overwrite)

        return append_block_ids

    # Called in every step.

    @torch.inference_mode()
    def propose(self, *inputs: Any, **options: Any) -> Any:
        """Drafts of a step, [rows, longest draft]; those beyond the step's length are not set."""
        given = PROPOSE.bind(self, *inputs, **options).arguments
        if given.get("dummy_run"):  # of the largest batch, to measure its memory
            return super().propose(*inputs, **options)
        length = given.get("num_speculative_tokens")
        if length is None:
            length = self.num_speculative_steps
        if length == 0 and self.ledger is not None:
            batch = given["input_batch"]
            self.ledger.skip(batch.idx_mapping_np, batch.num_computed_tokens_np)
        else:
            self._draft(length, given)
        return self.draft_tokens[: given["input_batch"].num_reqs]

    def _draft(self, length: int, given: dict[str, Any]) -> None:
        batch, num_rejected = given["input_batch"], given["num_rejected"]
        self._copy_request_inputs(
            batch.num_reqs, batch.idx_mapping, given["temperature"], given["seeds"]
        )
        self.current_draft_step.zero_()
        missing = self._missing_tokens(batch)
        if missing is None:
            self._run_first_pass(batch, num_rejected, given["last_sampled"])
        else:
            self._run_first_pass_with_missing(batch, num_rejected, missing)
        if length > 1:
            self._prepare_later_passes(batch, num_rejected)
            self._run_later_passes(batch, length)

    def _missing_tokens(self, batch: Any) -> Ints | None:
        """Number of tokens of each row without the draft model's KV, or None if there are none."""
        if self.ledger is None:
            return None
        counts = self.ledger.missing(
            batch.idx_mapping_np,
            batch.num_computed_tokens_np,
            batch.num_scheduled_tokens,
            batch.is_prefilling_np,
        )
        return counts if counts.any() else None

    # Tokens that earlier steps have left out.

    def _run_first_pass_with_missing(
        self, batch: Any, num_rejected: torch.Tensor, missing: Ints
    ) -> None:
        room = len(self.expanded_input_ids)
        verified = batch.num_scheduled_tokens.astype(np.int64) + CORRECTION_TOKENS
        begins = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
        lens = async_tensor_h2d(batch.num_scheduled_tokens, device=self.device)
        ends = begins + lens - num_rejected[: batch.num_reqs] + CORRECTION_TOKENS
        while int((missing + verified).sum()) > room:
            missing = self._run_missing_tokens(batch, begins, ends, missing, room)
        rows = Rows(
            states=batch.idx_mapping,
            first=self._first_positions(begins, missing),
            ends=ends,
            lens=missing + verified,
        )
        self._first_pass(batch.num_reqs, rows.num_tokens, *self._prepare_rows(batch, rows))

    def _run_missing_tokens(
        self, batch: Any, begins: torch.Tensor, ends: torch.Tensor, missing: Ints, room: int
    ) -> Ints:
        """Compute as many missing tokens as one pass takes; returns the numbers still missing."""
        before = np.cumsum(missing) - missing
        lens = np.clip(room - before, 0, missing)
        chosen = np.flatnonzero(lens)
        index = async_tensor_h2d(chosen, device=self.device)
        states = batch.idx_mapping[index]
        rows = Rows(
            states=states,
            first=self._first_positions(begins, missing)[index],
            ends=ends[index],
            lens=lens[chosen],
        )
        self.block_tables.gather_block_tables(states, num_reqs_padded=len(chosen))
        prepared = self._prepare_rows(batch, rows)
        total = rows.num_tokens
        self._run_model(
            self.expanded_input_ids[:total], self.expanded_positions[:total], *prepared, None
        )
        self.block_tables.gather_block_tables(batch.idx_mapping, num_reqs_padded=batch.num_reqs)
        return missing - lens

    def _first_positions(self, begins: torch.Tensor, missing: Ints) -> torch.Tensor:
        """Positions from which rows are computed.

        `missing` may count rejected drafts, which lie behind a row's beginning.
        """
        return torch.clamp(begins - async_tensor_h2d(missing, device=self.device), min=0)

    def _prepare_rows(self, batch: Any, rows: Rows) -> tuple[Any, Any]:
        """Write the inputs of an eager pass over rows; returns its metadata and slot mappings."""
        num_reqs, total = len(rows.lens), rows.num_tokens
        starts = np.concatenate([[0], np.cumsum(rows.lens)]).astype(np.int32)
        is_real = self._write_inputs(rows, async_tensor_h2d(starts, device=self.device))
        slots = self.block_tables.compute_slot_mappings(
            rows.states,
            self.input_buffers.query_start_loc[: num_reqs + 1],
            self.expanded_positions[:total],
            total,
            out=self.expanded_slot_mappings,
        ).masked_fill_(~is_real, PAD_SLOT_ID)
        metadata = self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.NONE, total, num_reqs),
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=self._length_bounds(batch, num_reqs),
            step=CORRECTION_TOKENS,
            slot_mappings=slots,
        )
        return metadata, build_slot_mappings_by_layer(slots, self.kv_cache_config)

    def _length_bounds(self, batch: Any, num_reqs: int) -> torch.Tensor:
        """Upper bounds of the lengths of any of the batch's rows."""
        longest = int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
        return torch.full((num_reqs,), longest, dtype=torch.int32, device="cpu")

    def _write_inputs(self, rows: Rows, starts: torch.Tensor) -> torch.Tensor:
        """Write tokens and positions; returns which of them are real, not padding."""
        num_reqs, total = len(rows.lens), rows.num_tokens
        lens = starts[1:] - starts[:-1]
        order = torch.arange(num_reqs, device=self.device)
        row = torch.repeat_interleave(order, lens, output_size=total)
        offsets = torch.arange(total, device=self.device) - starts[row]
        positions = rows.first[row] + offsets
        is_real = positions < rows.ends[row]
        positions.clamp_(max=self.max_model_len - 1)
        tokens = self.req_states.all_token_ids.gpu[rows.states[row], positions]
        self.expanded_input_ids[:total] = torch.where(is_real, tokens, 0)
        self.expanded_positions[:total] = positions
        buffers = self.input_buffers
        buffers.query_start_loc[: num_reqs + 1] = starts
        buffers.query_start_loc[num_reqs + 1 :] = total
        buffers.seq_lens[:num_reqs] = torch.clamp(rows.first + lens, max=self.max_model_len)
        buffers.seq_lens[num_reqs:] = 0
        self.last_token_indices[:num_reqs] = starts[:-1] + rows.ends - 1 - rows.first
        return is_real
