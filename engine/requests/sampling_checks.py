"""Validation of a request's sampling parameters before submission, outside the event loop.

vLLM validates every sample on the event loop: it tokenizes bad words and parses structured outputs.
Here both are done once per request.
"""

import asyncio
import functools
from typing import Any, Final

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from engine.errors import SamplingRefused
from engine.launch.processes import VllmProcesses
from engine.requests.grammar_check import GrammarChecker
from engine.sampling.grammar_budget import OVERRUN
from engine.types.samples import Completion, SampleRequest, Sampling

XGRAMMAR: Final = "xgrammar"


@functools.lru_cache(maxsize=256)
def bad_word_ids(words: tuple[str, ...], tokenizer: Any) -> list[list[int]]:
    """Token ids of bad words, as vLLM tokenizes them: with and without a space before each."""
    params = SamplingParams(bad_words=list(words))
    params.update_from_tokenizer(tokenizer)
    found: list[list[int]] = params.bad_words_token_ids or []
    return found


class SamplingChecks:
    """Validates sampling parameters for one engine."""

    def __init__(self, processes: VllmProcesses) -> None:
        self._processes = processes
        self._grammars = GrammarChecker(self._tokenizer_info)

    async def check(self, sampling: Sampling, client: str) -> None:
        """Raise SamplingRefused if a parameter cannot be applied."""
        self._check_vocabulary(sampling)
        if sampling.bad_words:
            await asyncio.to_thread(self._check_bad_words, sampling.bad_words)
        if sampling.structured_outputs is not None and self._backend == XGRAMMAR:
            await self._grammars.check(sampling, client)

    def on_finished(self, sample: SampleRequest, completion: Completion) -> None:
        """Refuse a constraint from now on that has taken too long in the engine."""
        has_overrun = completion.finish == "error" and completion.stop_reason == OVERRUN
        constraint = sample.sampling.structured_outputs
        if has_overrun and constraint is not None:
            self._grammars.refuse(constraint)

    async def close(self) -> None:
        await self._grammars.close()

    @property
    def _backend(self) -> str:
        config = self._processes.llm.vllm_config.structured_outputs_config
        return str(config.backend)

    def _check_vocabulary(self, sampling: Sampling) -> None:
        size = self._processes.llm.vllm_config.model_config.get_vocab_size()
        given = {
            "logit_bias": sampling.logit_bias.keys(),
            "allowed_token_ids": sampling.allowed_token_ids or (),
            "stop_token_ids": sampling.stop_token_ids,
        }
        for field, token_ids in given.items():
            if any(token >= size for token in token_ids):
                raise SamplingRefused(field, f"token ids must be below {size}")

    def _check_bad_words(self, words: tuple[str, ...]) -> None:
        try:
            token_ids = bad_word_ids(words, self._processes.llm.get_tokenizer())
        except VLLMValidationError as error:
            raise SamplingRefused("bad_words", str(error.args[0])) from error
        limit = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        if sum(map(len, token_ids)) > limit:
            raise SamplingRefused("bad_words", f"they may have at most {limit} tokens in total")

    def _tokenizer_info(self) -> str:
        """The tokenizer as xgrammar's JSON, with the vocabulary of the model."""
        import xgrammar

        size = self._processes.llm.vllm_config.model_config.get_vocab_size()
        tokenizer = self._processes.llm.get_tokenizer()
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        return str(info.serialize_json())
