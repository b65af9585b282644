"""Patch of verl's FSDP actor: logprobs normalized over the token ids that sampling allowed.

verl has no extension point for them. `install` wraps the method of verl's FSDP engine that computes
logprobs; the rollout and the checkpoint engine call it in the trainer's processes if
`return_support` is set. `keep_supports` wraps a method of verl's asynchronous client, which drops
the extra fields of aborted parts of a response.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from coppice.errors import Unsupported
from coppice.integrations.verl.generation import join_outputs, support_of
from coppice.train import sampled_logprobs

NO_SUPPORT = (
    "a sample lacks supports: return_support needs one turn per sample, from rollout coppice"
)


def install() -> None:
    """Wraps the logprobs of verl's FSDP engine in this process; repeated calls do nothing.

    Other engines are refused.
    """
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    original = FSDPEngineWithLMHead.prepare_model_outputs
    if getattr(original, "replays_supports", False):
        return

    @wraps(original)
    def prepare_model_outputs(
        self: Any,
        output: Any,
        output_args: Any,
        micro_batch: TensorDict,
        logits_processor_func: Any,
    ) -> dict[str, Any]:
        given = (output, output_args, micro_batch, logits_processor_func)
        if tu.get_non_tensor_data(micro_batch, "distillation_only", default=False):
            return dict(original(self, *given))
        _check(self, micro_batch)
        # verl then computes all outputs but the logprobs.
        others = micro_batch.copy()
        tu.assign_non_tensor(others, distillation_only=True)
        outputs = dict(original(self, output, output_args, others, logits_processor_func))
        return {**outputs, "log_probs": logprobs_of(output.logits, micro_batch)}

    prepare_model_outputs.replays_supports = True  # type: ignore[attr-defined]
    FSDPEngineWithLMHead.prepare_model_outputs = prepare_model_outputs
    for engines in EngineRegistry._engines["language_model"].values():
        for engine in engines.values():
            if getattr(engine, "prepare_model_outputs", None) is not prepare_model_outputs:
                engine.forward_backward_batch = _refuse


def _refuse(*_: Any, **__: Any) -> None:
    raise Unsupported("return_support needs actor.strategy=fsdp or fsdp2")


def _check(engine: Any, micro_batch: TensorDict) -> None:
    if tu.get_non_tensor_data(micro_batch, "use_fused_kernels", default=False):
        raise Unsupported("return_support needs logits: set model.use_fused_kernels=False")
    if engine.use_ulysses_sp:
        raise Unsupported("return_support needs actor.ulysses_sequence_parallel_size=1")


def logprobs_of(logits: Tensor, micro_batch: TensorDict) -> Tensor:
    """Logprobs of the responses' tokens, a jagged tensor [rows, prompt and response tokens].

    As in verl, each is at the position before its token. Those of prompts and of samples that are
    not trained on are 0.
    """
    input_ids, starts = micro_batch["input_ids"], micro_batch["input_ids"].offsets().tolist()
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    is_packed = tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True)
    temperatures = _temperatures(micro_batch, len(starts) - 1)
    parts = []
    for row, (ids, length, field) in enumerate(
        zip(input_ids.unbind(), response_lengths(micro_batch), _fields(micro_batch), strict=True)
    ):
        at = slice(starts[row], starts[row + 1])
        row_logits = logits[0, at] if is_packed else logits[row, : len(ids)]
        before = logits.new_zeros(len(ids) - length - 1, dtype=torch.float32)
        if length == 0 or not _is_trained(micro_batch, row):
            parts.append(logits.new_zeros(len(ids), dtype=torch.float32))
            continue
        if field is None or len(support := support_of(field)) < length:
            raise Unsupported(NO_SUPPORT)
        logprobs = sampled_logprobs(
            row_logits[len(ids) - length - 1 : -1],
            ids[len(ids) - length :],
            temperature=temperatures[row],
            support=support[:length],
        )
        parts.append(torch.cat([before, logprobs, before.new_zeros(1)]))
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts), input_ids.offsets())


def response_lengths(micro_batch: TensorDict) -> list[int]:
    """Number of response tokens of each row, in both of verl's layouts."""
    responses = micro_batch["responses"]
    if responses.is_nested:
        lengths: list[int] = responses.offsets().diff().tolist()
        return lengths
    mask = micro_batch["attention_mask"]
    of_padded: list[int] = mask[:, mask.shape[1] - responses.shape[1] :].sum(1).tolist()
    return of_padded


def _temperatures(micro_batch: TensorDict, num_rows: int) -> list[float]:
    given = micro_batch["temperature"]
    if isinstance(given, Tensor):
        temperatures: list[float] = given.expand(num_rows).tolist()
        return temperatures
    return [float(getattr(given, "data", given))] * num_rows


def _is_trained(micro_batch: TensorDict, row: int) -> bool:
    mask = micro_batch.get("response_mask", None)
    return mask is None or bool(mask.unbind()[row].any())


def _fields(micro_batch: TensorDict) -> Sequence[Any]:
    """Supports of each row as the rollout returned them, or None.

    verl's trainer has them in a column of their own or among the extra fields of a sample.
    """
    num_rows = micro_batch.batch_size[0]
    own = tu.get(micro_batch, "support", default=None)
    if own is not None:
        return list(own)
    extra = tu.get(micro_batch, "extra_fields", default=None) or [{}] * num_rows
    return [fields.get("support") for fields in extra]


_PARTS: ContextVar[list[Any] | None] = ContextVar("supports of one response's parts", default=None)


def keep_supports() -> None:
    """Makes verl's asynchronous client return the supports of all parts of a response."""
    whole, single = FullyAsyncLLMServerClient.generate, LLMServerClient.generate
    if getattr(single, "keeps_supports", False):
        return

    @wraps(single)
    async def generate_part(self: Any, *args: Any, **named: Any) -> Any:
        output = await single(self, *args, **named)
        parts = _PARTS.get()
        if parts is not None and output.token_ids:
            parts.append(output.extra_fields.get("support"))
        return output

    @wraps(whole)
    async def generate(self: Any, *args: Any, **named: Any) -> Any:
        parts: list[Any] = []
        before = _PARTS.set(parts)
        try:
            output = await whole(self, *args, **named)
        finally:
            _PARTS.reset(before)
        if parts and None not in parts:
            output.extra_fields["support"] = join_outputs(parts)
        return output

    generate_part.keeps_supports = True  # type: ignore[attr-defined]
    LLMServerClient.generate, FullyAsyncLLMServerClient.generate = generate_part, generate
