"""Integration with TRL: rollouts by a Coppice server, weights over HTTP without NCCL or a GPU.

`rollout_func` is for GRPOTrainer's argument `rollout_func`. TRL's sampler repeats every prompt once
per generation, consecutively. A run of equal prompts becomes one group, whose prompt is prefilled
once. The samples come from the trainer's weights.

`install` replaces the client of TRL's server mode, `GRPOConfig(use_vllm=True,
vllm_mode="server")`. TRL's client requests samples as before, and TRL gathers and renames the
weights. Only the transfer of weights is replaced.

`WeightTransfer` is for the argument `weight_transfer` of TRL's asynchronous trainers.

trl must be installed; `install` also needs vllm.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from coppice.client import Rollouts
from coppice.errors import Incomplete, Unsupported
from coppice.integrations.weights_version_labels import LabelGenerator
from coppice.rollout_options import RolloutOptions
from coppice.rollout_results import Group, Sample
from coppice.wire.columns.support import Support
from coppice.wire.rollouts import WeightsConstraint

# GRPOConfig arguments that SupportReplay needs to be exact, and their values without effect.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}


class RolloutFunc:
    """Callable for TRL's GRPOTrainer(rollout_func=...): publishes changed weights, then samples.

    For a PEFT model only the adapter is published, under one name with one version per step. With
    `return_support`, the supports of the tokens are an extra field, which TRL passes to reward
    functions and `SupportReplay` to the trainer's logprobs.
    """

    def __init__(self, rollouts: Rollouts, *, return_support: bool = False) -> None:
        self._rollouts = rollouts
        self._return_support = return_support
        self.supports = Supports()
        self._labels = LabelGenerator("trl")
        self._step: int | None = None
        self._target_options: RolloutOptions = {}

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        self._publish(trainer)
        rows = [_token_ids(prompt, trainer) for prompt in prompts]
        runs = [(row, len(list(same))) for row, same in groupby(rows)]
        options = {
            **self._sampling(trainer),
            **self._target_options,
            "return_support": self._return_support,
        }
        pending = [self._rollouts.submit([row], n=n, **options) for row, n in runs]
        groups = [waiting.wait().groups[0] for waiting in pending]
        samples = [sample for group in groups for sample in _check_complete(group).samples]
        output = {
            "prompt_ids": rows,
            "completion_ids": [sample.token_ids.tolist() for sample in samples],
            "logprobs": [sample.logprobs.tolist() for sample in samples],
        }
        if self._return_support:
            output["support"] = [sample.support for sample in samples]
            self.supports.replace(rows, samples)
        return output

    def _sampling(self, trainer: Any) -> dict[str, Any]:
        args = trainer.args
        changed = {
            name: value
            for name, neutral in _NEUTRAL_VALUES.items()
            if (value := getattr(args, name)) not in neutral
        }
        if changed and not (self._return_support and isinstance(trainer, SupportReplay)):
            [(name, value), *_] = changed.items()
            raise Unsupported(
                f"{name}={value} is not supported without return_support=True and a trainer with "
                "SupportReplay: TRL's logprobs are not those of the samples"
            )
        return {
            "max_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k or 0,
            **changed,
        }

    def _publish(self, trainer: Any) -> None:
        """Publishes new weights from the main process and broadcasts the version to sample from.

        All processes take part, because gathering the weights is a collective operation.
        """
        from accelerate.utils import broadcast_object_list  # a dependency of TRL

        step = trainer.state.global_step
        if step == self._step:
            return
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.accelerator.is_main_process:
            label = self._labels.next()
            model = trainer.accelerator.unwrap_model(trainer.model)
            if hasattr(model, "peft_config"):
                self._publish_adapter(label, model, state)
            else:
                self._rollouts.publish_weights(label, state)
                self._target_options = {"weights": WeightsConstraint(exact_version=label)}
        [self._target_options] = broadcast_object_list([self._target_options], from_process=0)
        self._step = step

    def _publish_adapter(self, label: str, model: Any, state: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
            model.save_pretrained(folder, state_dict=state)
            self._rollouts.publish_adapter(self._labels.run, label, folder)
        self._target_options = {"adapter": f"{self._labels.run}@{label}"}


class Supports:
    """Supports of the samples of the current batch, by the token ids of prompt and completion.

    TRL shuffles and splits a batch, but keeps its token ids. Equal samples of one batch come from
    the same weights, so their supports are equal, too.
    """

    def __init__(self) -> None:
        self._by_tokens: dict[tuple[int, ...], Support | None] = {}

    def replace(self, prompts: Sequence[list[int]], samples: Sequence[Sample]) -> None:
        self._by_tokens = {
            (*prompt, *sample.token_ids.tolist()): sample.support
            for prompt, sample in zip(prompts, samples, strict=True)
        }

    def get(self, token_ids: Sequence[int]) -> Support:
        found = self._by_tokens.get(tuple(token_ids))
        if found is None:
            raise ValueError("these token ids are not a sample of the current batch")
        return found


class SupportReplay:
    """Mixin of TRL's GRPOTrainer that computes logprobs of the distribution of the samples.

    These are over the supports of the tokens, and with the repetition penalty of GRPOConfig. Put it
    before the trainer's class, and give the trainer a `rollout_func` with `return_support=True`.
    Only text models are supported.
    """

    rollout_func: RolloutFunc
    temperature: float
    args: Any

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Any, Any, Any]:
        """TRL's logprobs [rows, logits_to_keep] of the completions, and their entropies."""
        import torch

        if compute_aux_loss or any(value is not None for value in images.values()):
            raise Unsupported("SupportReplay is for text models without a load-balancing loss")
        size = batch_size or len(input_ids)
        parts = [
            self._replayed(model, ids, mask, logits_to_keep, with_entropy=compute_entropy)
            for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True)
        ]
        logprobs = torch.cat([logprobs for logprobs, _ in parts])
        entropies = [entropy for _, entropy in parts]
        return logprobs, torch.cat(entropies) if compute_entropy else None, None

    def _replayed(
        self, model: Any, input_ids: Any, attention_mask: Any, num_kept: int, *, with_entropy: bool
    ) -> tuple[Any, Any]:
        import torch

        from coppice.train import LogitAdjustments, sampled_logprobs

        adjustments = LogitAdjustments(repetition_penalty=self.args.repetition_penalty)
        logits = model(
            input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=num_kept + 1
        ).logits[:, :-1]
        logprobs = torch.zeros(logits.shape[:2], device=logits.device)
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            completion = ids[-num_kept:][mask[-num_kept:]]
            if len(completion):  # otherwise TRL ignores the sample
                logprobs[row, : len(completion)] = sampled_logprobs(
                    logits[row, : len(completion)],
                    completion,
                    temperature=self.temperature,
                    support=self.rollout_func.supports.get(ids[mask].tolist()),
                    adjustments=adjustments,
                    prompt=ids[mask][: -len(completion)],
                )
        if not with_entropy:
            return logprobs, None
        full = (logits / self.temperature).log_softmax(-1)
        return logprobs, -(full.exp() * full).sum(-1)


def rollout_func(rollouts: Rollouts, *, return_support: bool = False) -> RolloutFunc:
    """Returns a callable for TRL's GRPOTrainer(rollout_func=...), to use with use_vllm=False."""
    return RolloutFunc(rollouts, return_support=return_support)


def _token_ids(prompt: Any, trainer: Any) -> list[int]:
    """Tokenizes a prompt in the same way as TRL."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    options = getattr(trainer, "chat_template_kwargs", None) or {}
    return list(
        tokenizer.apply_chat_template(
            prompt,
            tools=getattr(trainer, "tools", None) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **options,
        )
    )


def _check_complete(group: Group) -> Group:
    """Raises Incomplete if samples of the group are missing, which TRL does not support."""
    if group.outcome != "done":
        raise Incomplete(f"a group ended as {group.outcome}, so some of its samples are missing")
    return group


class WeightTransfer:
    """Weight transfer of TRL's asynchronous trainers, over HTTP instead of NCCL.

    Pass it as `weight_transfer` to AsyncGRPOTrainer or AsyncDistillationTrainer. The server pauses
    itself while it activates weights.
    """

    def __init__(self, rollouts: Rollouts, *, ready_seconds: float = 240.0) -> None:
        self._rollouts = rollouts
        self._ready_seconds = ready_seconds
        self._labels = LabelGenerator("trl")

    def init_weight_transfer(self) -> None:
        """Waits until the server is ready."""
        self._rollouts.wait_until_ready(self._ready_seconds)

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Publishes the parameters; gathered ones are freed after their iteration."""
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in iterator}
        self._rollouts.publish_weights(self._labels.next(), state)

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        self._rollouts.close()


def install() -> None:
    """Replaces TRL's VLLMClient by a subclass that publishes weights to a Coppice server by HTTP.

    Call it before creating a trainer; repeated calls do nothing.
    """
    from trl.generation import vllm_client, vllm_generation

    if getattr(vllm_generation.VLLMClient, "over_http", False):
        return
    vllm_client.VLLMClient = vllm_generation.VLLMClient = _over_http(vllm_client.VLLMClient)


def _over_http(base: Any) -> Any:
    class HttpClient(base):  # type: ignore[misc]
        """TRL's VLLMClient, but sending weights as one safetensors file over HTTP."""

        over_http = True

        def init_communicator(self, device: Any = 0) -> None:
            """Creates the HTTP client for weights, instead of joining an NCCL process group."""
            self._rollouts = Rollouts(self.base_url)
            self._labels = LabelGenerator("trl")

        def update_named_params(
            self, metadata: Iterable[Any], named_params: Iterator[tuple[str, Any]]
        ) -> None:
            """Copies the parameters to the CPU; gathered ones are freed after their iteration."""
            if not self._updating_weights:
                self._start_weight_update()
            for name, tensor in named_params:
                self._pending[name] = tensor.detach().to("cpu", copy=True)
            if not self._updating_weights:
                self._finish_weight_update()

        def _start_weight_update(self) -> None:
            self._pending: dict[str, Any] = {}

        def _finish_weight_update(self) -> None:
            pending, self._pending = self._pending, {}
            self._rollouts.publish_weights(self._labels.next(), pending)

        def close_communicator(self) -> None:
            self._rollouts.close()

    HttpClient.__name__ = base.__name__
    return HttpClient
