"""Logprobs of samples and prompts in Coppice's types.

Logprobs of given tokens are computed by prefilling them as a prompt. vLLM does not use cached
prefixes for such a request. So samples never request prompt logprobs, since their siblings would
prefill the prompt again.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engine.errors import EngineDead, RequestRefused
from engine.requests.logprob_arrays import LogprobChunks
from engine.sampling.given_prompt_logprobs import to_extra_args
from engine.types.samples import TopLogprobRows


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens that are prefilled for their logprobs by the engine of a data-parallel rank."""

    token_ids: Sequence[int]
    adapter: LoRARequest | None
    rank: int | None = None


async def prompt_logprobs(
    llm: AsyncLLM,
    token_ids: Sequence[int],
    adapter: LoRARequest | None,
    num_top_logprobs: int,
    rank: int | None = None,
) -> TopLogprobRows:
    """Logprobs of given tokens and of the top k at their positions; the first position has none.

    `rank` is the data-parallel rank of the engine that computes them.
    """
    scored = ScoredTokens(token_ids, adapter, rank=rank)
    output = await _score(llm, scored, prompt_logprobs=num_top_logprobs)
    return prompt_rows(output.prompt_logprobs)


async def given_logprobs(
    llm: AsyncLLM, scored: ScoredTokens, given: NDArray[np.int32]
) -> TopLogprobRows:
    """Logprobs of given tokens and of further tokens [tokens, m] at their positions.

    vLLM's second model runner has a parameter for this, without ranks. In the first one,
    `prompt_token_ids` gathers the logprobs.
    """
    if not llm.vllm_config.use_v2_model_runner:
        args = to_extra_args(given[1:])
        output = await _score(llm, scored, prompt_logprobs=given.shape[1], extra_args=args)
        rows = prompt_rows(output.prompt_logprobs)
        assert np.array_equal(rows.token_ids[1:, 1:], given[1:]), "the hook gathered the tokens"
        return rows
    all_ids = np.column_stack([np.asarray(scored.token_ids, np.int32), given])
    if len(all_ids) < 2:
        return TopLogprobRows(
            all_ids, np.full(all_ids.shape, -np.inf, np.float32), np.zeros(1, int)
        )
    output = await _score(llm, scored, prompt_logprob_token_ids=all_ids[1:])
    logprobs = np.pad(output.prompt_token_id_logprobs, ((1, 0), (0, 0)), constant_values=-np.inf)
    return TopLogprobRows(all_ids, logprobs, np.zeros(len(all_ids), np.int64))


async def _score(llm: AsyncLLM, scored: ScoredTokens, **options: Any) -> RequestOutput:
    """Prefill given tokens for their logprobs. A request that a pause aborts is repeated."""
    output = await _score_once(llm, scored, options)
    while output.outputs[0].finish_reason == "abort":
        output = await _score_once(llm, scored, options)
    return output


async def _score_once(
    llm: AsyncLLM, scored: ScoredTokens, options: Mapping[str, Any]
) -> RequestOutput:
    # vLLM requires that the request samples a token.
    params = SamplingParams(
        max_tokens=1,
        logprobs=0,  # of this token: NaN then ends no other request, see patches/nan_logits.py
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **options,
    )
    try:
        generated = llm.generate(
            tokens_input(list(scored.token_ids)),
            params,
            uuid.uuid4().hex,
            lora_request=scored.adapter,
            data_parallel_rank=scored.rank,
        )
        (output,) = [output async for output in generated]
    except EngineDeadError as error:
        raise EngineDead("the engine process died") from error
    except VLLMClientError as error:
        raise RequestRefused(str(error)) from error
    return output


def sampled_logprobs(found: LogprobChunks | None) -> list[float]:
    """Logprob of the sampled token at every position, which vLLM puts first."""
    logprobs: list[float] = [] if found is None else found.rows().logprobs[:, 0].tolist()
    return logprobs


def prompt_rows(found: LogprobChunks | None) -> TopLogprobRows:
    """Top logprobs at each position of a prompt; the first one has none."""
    rows = LogprobChunks().rows() if found is None else found.rows()
    return TopLogprobRows(
        np.pad(rows.token_ids, ((1, 0), (0, 0))),
        np.pad(rows.logprobs, ((1, 0), (0, 0)), constant_values=-np.inf),
        np.pad(rows.ranks, (1, 0)),
    )


def top_k_entropies(rows: TopLogprobRows, k: int) -> list[float]:
    """Entropy at each position over the renormalised top k logprobs.

    Excluded tokens, at minus infinity, are ignored.
    """
    logprobs = rows.logprobs[:, 1 : k + 1].astype(np.float64)
    probabilities = np.exp(logprobs)
    totals = np.maximum(probabilities.sum(axis=1), np.finfo(np.float64).tiny)
    means = np.where(probabilities > 0, probabilities * logprobs, 0.0).sum(axis=1) / totals
    entropies: list[float] = np.maximum(np.log(totals) - means, 0.0).tolist()
    return entropies
