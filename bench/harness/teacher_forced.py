"""Makes samples generate the texts that an earlier run sampled (teacher forcing).

Lossless speculation does not change the output distribution, so a text sampled without drafts is a
valid sample for any drafter. An engine computes, verifies and samples as usual. Then each sample
gets the tokens of its text: the correctly drafted ones and one more. So all arms do the same work,
sample by sample, and differ only in their steps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.replay.replay import common_prefix_length
from engine.speculation.controller import Controller, Draft
from kernels.draft_index.store_protocol import Int32Array


class TeacherForced:
    """Wraps a model runner's `_sample` so that requests generate the given texts.

    `texts` are by request id. While there are none, sampling is unaffected.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._sample = runner, runner._sample
        self.texts: dict[str, list[int]] = {}
        runner._sample = self.sample

    def left(self) -> list[list[int]]:
        """Tokens that each sample of the batch still has to generate."""
        batch = self._runner.input_batch
        ids = batch.req_ids
        said = batch.num_tokens_no_spec[: len(ids)] - batch.num_prompt_tokens[: len(ids)]
        return [self.texts[one][number:] for one, number in zip(ids, said.tolist(), strict=True)]

    def sample(self, logits: Any, metadata: Any) -> Any:
        came = self._sample(logits, metadata)
        if not self.texts:
            return came
        rows = [
            text[: common_prefix_length(draft, text) + 1]
            for draft, text in zip(self._drafts(metadata), self.left(), strict=True)
        ]
        tokens = torch.full_like(came.sampled_token_ids, -1)
        for row, said in zip(tokens, rows, strict=True):
            row[: len(said)] = torch.tensor(said, dtype=tokens.dtype)
        return replace(came, sampled_token_ids=tokens)

    def _drafts(self, metadata: Any) -> Sequence[list[int]]:
        if metadata is None:
            return [[]] * len(self._runner.input_batch.req_ids)
        tokens = iter(metadata.draft_token_ids.tolist())
        return [[next(tokens) for _ in range(number)] for number in metadata.num_draft_tokens]


class Fixed(Controller):
    """Draft-length controller that cuts every draft to a fixed length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def should_draft(self, running: int) -> bool:
        return self._length > 0

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        return np.minimum(drafted.lengths, self._length).astype(np.int32)


class OraclePolicy(Controller):
    """Draft-length controller that knows the text and sends only the correct part of drafts."""

    def __init__(self, forced: TeacherForced) -> None:
        super().__init__()
        self._teacher_forced = forced

    def should_draft(self, running: int) -> bool:
        return True

    def lengths(self, drafted: Any, *, running: int, context: int) -> Int32Array:
        texts = self._teacher_forced.left()
        if len(texts) != len(drafted.lengths):
            # Prompts of the batch are still prefilled, and have no draft.
            return np.zeros(len(drafted.lengths), np.int32)
        right = [
            common_prefix_length(draft[:length].tolist(), text)
            for draft, length, text in zip(drafted.tokens, drafted.lengths, texts, strict=True)
        ]
        return np.array(right, np.int32)
