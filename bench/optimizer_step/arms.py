"""Different ways (arms) to compute a group's gradient in an optimiser step, for comparison."""

import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bench.optimizer_step.cells import Cell
from bench.optimizer_step.prefix_grouper import NAME, GroupedInputs
from coppice.train import (
    LossFunction,
    PromptKV,
    RowLogprobs,
    Schedule,
    Totals,
    compute_prompt_kv,
    group_logprobs,
    grouped_backward,
    grpo_loss,
    token_mean,
)
from coppice.train.token_logprobs import token_logprobs


class Arms:
    """Computes the same gradient in different ways, with one model and one group.

    The learning rate is zero.
    """

    def __init__(
        self, cell: Cell, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.cell = cell
        self.device = device
        self.clock = clock
        self.model = cell.model().to(device)
        self.group = cell.group()
        self.grouped = GroupedInputs(self.group, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        advantages = torch.linspace(-1, 1, cell.num_samples)
        weights = token_mean(Totals.of([self.group]))
        self.loss: LossFunction = partial(grpo_loss, advantages=advantages, weights=weights)

    def seconds(self, backward: Callable[[], None]) -> tuple[float, float]:
        """Time an optimiser step; returns the seconds of the gradient and of the update."""
        self.optimizer.zero_grad()
        began = self._now()
        backward()
        middle = self._now()
        self.optimizer.step()
        return middle - began, self._now() - middle

    def _now(self) -> float:
        """Time after all work queued on the GPU, if any, has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.clock()

    def ours(
        self, schedule: Schedule | Literal["auto"] = "auto", prompt_kv: PromptKV | None = None
    ) -> None:
        grouped_backward(self.model, self.group, self.loss, schedule=schedule, prompt_kv=prompt_kv)

    def single(self) -> None:
        """Compute the gradient one response at a time, which keeps the fewest activations."""
        grouped_backward(self.model, self.group, self.loss, schedule="recomputed", pass_tokens=1)

    def public(self) -> None:
        self.model.config._attn_implementation = NAME
        self.loss(self.grouped.logprobs(self.model)).backward()  # type: ignore[no-untyped-call]
        self.model.config._attn_implementation = "sdpa"

    def naive_rows(self, count: int) -> None:
        """Compute the gradient of a micro-batch of `count` rows that each repeat the prompt.

        Logits are computed only for response tokens.
        """
        some = slice(0, count)
        responses_NR = torch.stack(self.group.responses[some])
        prompts_NP = self.group.prompt.expand(count, -1)
        R = responses_NR.shape[1]
        logits_NRV = self.model(
            input_ids=torch.cat([prompts_NP, responses_NR], 1)[:, :-1].to(self.device),
            use_cache=False,
            logits_to_keep=R,
        ).logits
        rows = RowLogprobs(
            logprobs=token_logprobs(logits_NRV.flatten(0, 1), responses_NR.flatten(), 1.0),
            rows=tuple(range(count)),
            lengths=(R,) * count,
        )
        self.loss(rows).backward()  # type: ignore[no-untyped-call]

    def prompt_kv(self) -> PromptKV:
        return compute_prompt_kv(self.model, self.group)

    def old_logprobs(self, prompt_kv: PromptKV | None = None) -> None:
        group_logprobs(self.model, self.group, prompt_kv)

    def gradient(self, backward: Callable[[], None]) -> Tensor:
        """Gradient of all parameters as one flat vector, computed in the given way."""
        self.optimizer.zero_grad()
        backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return torch.cat([grad.flatten().float() for grad in grads])
