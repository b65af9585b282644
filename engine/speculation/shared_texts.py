"""Texts that other engines have generated, passed from the service to the draft store.

A call runs in the process that has the store, between two engine steps, so its size is bounded.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from engine.runtime.await_engine import await_engine
from engine.settings import SpeculationSettings
from engine.speculation.drafting import CallTexts
from engine.speculation.process_settings import SIBLING_MODES
from engine.types import DraftTexts, EngineInfo

Tokens = NDArray[np.int32]

MAX_CALL_TOKENS = 4096
"""Maximum number of tokens of a call, unless one prompt or response is longer."""
MIN_TEXT_TOKENS = 64
"""Number of tokens that a response counts as at least; adding a shorter one takes as long."""
LABEL_BYTES = 16


async def store_label(llm: AsyncLLM, settings: SpeculationSettings, info: EngineInfo) -> str | None:
    """Label of the engine's draft store; None if it drafts nothing from one.

    Engines whose stores have the same label serve the same model with the same vocabulary.
    """
    is_drafting = any(one.enabled for one in info.features if one.name == "speculation")
    if settings.mode not in SIBLING_MODES or not is_drafting:
        return None
    return await asyncio.to_thread(_label, llm)


def _label(llm: AsyncLLM) -> str:
    config = llm.vllm_config.model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    identity = [config, sorted(llm.get_tokenizer().get_vocab().items())]
    serialized = json.dumps(identity, sort_keys=True, default=str).encode()
    return hashlib.blake2b(serialized, digest_size=LABEL_BYTES).hexdigest()


async def add_texts(llm: AsyncLLM, texts: Iterable[DraftTexts]) -> int:
    """Add texts to the draft store; returns the number of responses that it has accepted."""
    return sum([await _add(llm, call) for call in calls(texts)])


def calls(texts: Iterable[DraftTexts]) -> Iterator[CallTexts]:
    """Split texts into the arguments of calls with at most MAX_CALL_TOKENS tokens."""
    call: list[tuple[bytes, Sequence[bytes], int]] = []
    num_tokens = 0
    for one in texts:
        for responses, num_response_tokens in _parts(one.responses):
            length = len(one.prompt) + num_response_tokens
            if call and num_tokens + length > MAX_CALL_TOKENS:
                yield call
                call, num_tokens = [], 0
            num_tokens += length
            call.append((one.prompt.tobytes(), responses, one.age))
    if call:
        yield call


def _parts(responses: Iterable[Tokens]) -> Iterator[tuple[Sequence[bytes], int]]:
    """Responses of one prompt, at most MAX_CALL_TOKENS tokens at a time, and their number."""
    part: list[bytes] = []
    num_tokens = 0
    for response in responses:
        length = max(MIN_TEXT_TOKENS, len(response))
        if part and num_tokens + length > MAX_CALL_TOKENS:
            yield part, num_tokens
            part, num_tokens = [], 0
        num_tokens += length
        part.append(response.tobytes())
    if part:
        yield part, num_tokens


async def _add(llm: AsyncLLM, call: CallTexts) -> int:
    if current_platform.is_cpu():
        added = llm.collective_rpc("coppice_add_drafts", args=(call,))
        return sum(await await_engine(llm, added))
    utility: Any = llm.engine_core.call_utility_async("coppice_add_sibling_drafts", call)
    num_added: int = await await_engine(llm, utility)
    return num_added
