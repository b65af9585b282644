"""Calls of EngineCore, answered or failed: vLLM forgets those that were on their way when it died.

Its futures for the answers are never resolved then. What does end, when the engine dies or is
stopped, is the task that handles the engine's outputs.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engine.errors import EngineDead

Answer = TypeVar("Answer")


async def answered(llm: AsyncLLM, call: Coroutine[Any, Any, Answer]) -> Answer:
    """EngineDead if the engine does not live to answer."""
    llm._run_output_handler()  # otherwise started by the first request only
    handler: asyncio.Task[None] = llm.output_handler
    answering = asyncio.ensure_future(call)
    try:
        await asyncio.wait({answering, handler}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise EngineDead("the engine process died")
        return answering.result()
    except EngineDeadError as error:
        raise EngineDead("the engine process died") from error
    finally:
        answering.cancel()
