"""verl's FSDP actor on truncated samples of a server with the same weights.

python -m tests.compat.clients.verl.actor URL    prints the importance ratios
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",  # the name under which its FSDP engine is registered
    VERL_USE_EXTERNAL_MODULES="tests.compat.clients.verl.cpu,coppice.integrations.verl.plugin",
    RANK="0",
    WORLD_SIZE="1",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
)

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.config import HFModelConfig as ModelConfig
from verl.workers.engine import EngineRegistry

from coppice import AsyncRollouts
from coppice.integrations.verl import support_replay
from coppice.integrations.verl.generation import Generation, GenerationOutput, LengthLimits
from tests.compat.clients.verl.training import MODEL

PROMPTS = ([5, 6, 7, 8, 9], [20, 21, 22], [30, 31, 32, 33])
SAMPLING = {"temperature": 1.5, "top_p": 0.8, "logprobs": True, "ignore_eos": True}
LIMITS = LengthLimits(prompt=16, response=24, context=512)


async def sampled(url: str) -> list[GenerationOutput]:
    generation = Generation(AsyncRollouts(url), LIMITS, return_support=True)
    pending = [generation.generate(str(at), row, SAMPLING) for at, row in enumerate(PROMPTS)]
    outputs = await asyncio.gather(*pending)
    await generation.close()
    return list(outputs)


def nested(rows: Any) -> Any:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def micro_batch(outputs: list[GenerationOutput], *, is_packed: bool, with_column: bool) -> Any:
    """As verl's trainer gives it to the actor; the last sample is one of verl's padding samples."""
    responses = [output.token_ids for output in outputs]
    rows = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, responses, strict=True)]
    masks = [[1] * len(tokens) for tokens in responses]
    rows, responses, masks = [*rows, [1, 2, 3]], [*responses, [3]], [*masks, [0]]
    fields = [*outputs, outputs[0]]
    data = TensorDict(
        {
            "input_ids": nested(rows),
            "position_ids": nested([range(len(row)) for row in rows]),
            "prompts": nested([row[: -len(r)] for row, r in zip(rows, responses, strict=True)]),
            "responses": nested(responses),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
        },
        batch_size=[len(rows)],
    )
    if with_column:
        column = [output.extra_fields["support"] for output in fields]
        tu.assign_non_tensor_stack(data, "support", column)
    else:
        tu.assign_non_tensor_stack(data, "extra_fields", [each.extra_fields for each in fields])
    tu.assign_non_tensor(
        data,
        temperature=SAMPLING["temperature"],
        use_remove_padding=is_packed,
        use_fused_kernels=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        calculate_entropy=True,
        global_token_num=[len(row) for row in rows],
    )
    return data


def actor(*, is_packed: bool) -> Any:
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=ModelConfig(
            path=str(MODEL),
            use_remove_padding=is_packed,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-4),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def ratios(engine: Any, data: Any, served: torch.Tensor) -> list[float]:
    """Importance ratios of the samples' tokens, by the logprobs that verl's trainer reads."""
    with engine.eval_mode():
        output = engine.infer_batch(data, loss_function=None)
    rows = output["model_output"]["log_probs"].unbind()[: len(PROMPTS)]
    lengths = data["responses"].offsets().diff().tolist()
    computed = [row[-length - 1 : -1] for row, length in zip(rows, lengths, strict=False)]
    found: list[float] = (torch.cat(computed) - served).exp().tolist()
    return found


def gradient(engine: Any, data: Any) -> float:
    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        return model_output["log_probs"].values().sum(), {}

    with engine.train_mode():
        output = engine.train_batch(data, loss_function=loss)
    return float(output["metrics"]["grad_norm"])


def main(url: str) -> dict[str, Any]:
    distributed: Any = torch.distributed
    store = distributed.HashStore()
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    outputs = asyncio.run(sampled(url))
    served = torch.cat([torch.tensor(output.log_probs) for output in outputs])
    found: dict[str, Any] = {}
    for is_packed in (False, True):
        engine = actor(is_packed=is_packed)
        batches = [
            micro_batch(outputs, is_packed=is_packed, with_column=with_column)
            for with_column in (False, True)
        ]
        if not is_packed:
            found["without"] = ratios(engine, batches[0], served)
        support_replay.install()
        support_replay.install()
        name = "packed" if is_packed else "padded"
        found[name] = [ratio for batch in batches for ratio in ratios(engine, batch, served)]
        found[f"{name}_grad_norm"] = gradient(engine, batches[0])
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
