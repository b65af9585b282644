"""Logprobs of sampled tokens and of prompts, and the text of single tokens.

Logprobs of given tokens are computed by prefilling them as a prompt. vLLM does not use cached
prefixes for such a request. So samples never ask for prompt logprobs, since their siblings would
prefill the prompt again.
"""

import math
import uuid
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engine.errors import EngineDead, RequestRefused
from engine.types import TokenLogprob, TopLogprobs


async def prompt_logprobs(
    llm: AsyncLLM, token_ids: Sequence[int], adapter: LoRARequest | None, num_top_logprobs: int
) -> Any:
    """vLLM's prompt logprobs of given tokens: one entry per token, the first one empty.

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
            _scoring_params(num_top_logprobs),
            uuid.uuid4().hex,
            lora_request=adapter,
        )
        (output,) = [output async for output in generated]
    except EngineDeadError as error:
        raise EngineDead("the engine process died") from error
    except VLLMClientError as error:
        raise RequestRefused(str(error)) from error
    return output


def _scoring_params(num_top_logprobs: int) -> SamplingParams:
    """SamplingParams of a request for prompt logprobs; vLLM requires that it samples a token."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=num_top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sampled_logprobs(flat: Any) -> list[float]:
    """Logprob of the sampled token at every position of vLLM's flat logprobs.

    vLLM puts the sampled token first at every position. The first position of a prompt has no
    entry.
    """
    if flat is None:
        return []
    spans = zip(flat.start_indices, flat.end_indices, strict=True)
    return [flat.logprobs[start] if end > start else 0.0 for start, end in spans]


def parse_top_logprobs(flat: Any) -> list[TopLogprobs]:
    """Top logprobs at each position, without tokens that top-k or top-p excluded."""
    if flat is None:
        return []
    each = list(zip(flat.token_ids, flat.logprobs, flat.ranks, strict=True))
    return [
        [TokenLogprob(*entry) for entry in each[start:end] if entry[1] > -math.inf]
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]


def top_k_entropies(flat: Any) -> list[float]:
    """Entropy at each position over the renormalised top k logprobs.

    The top k tokens are listed after the sampled token.
    """
    if flat is None:
        return []
    spans = zip(flat.start_indices, flat.end_indices, strict=True)
    return [_entropy(flat.logprobs[start + 1 : end]) for start, end in spans]


def _entropy(logprobs: list[float]) -> float:
    """Entropy of renormalised logprobs. Excluded tokens, at minus infinity, are ignored."""
    kept = [logprob for logprob in logprobs if logprob > -math.inf]
    probabilities = [math.exp(logprob) for logprob in kept]
    total = sum(probabilities)
    if not total:
        return 0.0
    mean = (
        sum(probability * logprob for probability, logprob in zip(probabilities, kept, strict=True))
        / total
    )
    return max(math.log(total) - mean, 0.0)


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Decoded text of each token. An incomplete character becomes the replacement character."""
    known = [token for token in token_ids if token < len(tokenizer)]
    found = dict(zip(known, convert_ids_list_to_tokens(tokenizer, known), strict=True))
    return [found.get(token, "") for token in token_ids]


def token_pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Vocabulary entry of each token, empty for the padding of the model's vocabulary."""
    return [piece or "" for piece in tokenizer.convert_ids_to_tokens(list(token_ids))]
