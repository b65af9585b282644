"""Logprobs of given tokens, computed by prefilling them as a prompt.

vLLM does not use cached prefixes for such a request. So a sample does not carry it, since its
siblings would prefill their prompt again.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engine.errors import EngineDead, RequestRefused
from engine.io.vllm_types import scoring_params


async def prompt_logprobs_of(
    llm: AsyncLLM,
    token_ids: Sequence[int],
    adapter: LoRARequest | None,
    *,
    num_top_logprobs: int = 0,
) -> Any:
    """vLLM's prompt logprobs: one entry per token, the first one empty.

    A request that a pause aborts is repeated.
    """
    output = await _score_once(llm, token_ids, adapter, num_top_logprobs)
    while output.outputs[0].finish_reason == "abort":
        output = await _score_once(llm, token_ids, adapter, num_top_logprobs)
    return output.prompt_logprobs


async def _score_once(
    llm: AsyncLLM, token_ids: Sequence[int], adapter: LoRARequest | None, num_top_logprobs: int
) -> RequestOutput:
    try:
        generated = llm.generate(
            tokens_input(list(token_ids)),
            scoring_params(num_top_logprobs),
            uuid.uuid4().hex,
            lora_request=adapter,
        )
        (output,) = [output async for output in generated]
    except EngineDeadError as error:
        raise EngineDead("the engine process died") from error
    except VLLMClientError as error:
        raise RequestRefused(str(error)) from error
    return output
