"""Await of EngineCore calls that raises EngineDead if the engine dies meanwhile.

vLLM never resolves the futures of calls that are in flight when the engine dies. The task that
handles the engine's outputs does end when the engine dies or is stopped, so calls wait for it too.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engine.errors import EngineDead

Result = TypeVar("Result")


async def await_engine(llm: AsyncLLM, call: Coroutine[Any, Any, Result]) -> Result:
    """Await a call of EngineCore. Raises EngineDead if the engine dies first."""
    llm._run_output_handler()  # otherwise started by the first request only
    handler: asyncio.Task[None] = llm.output_handler
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task, handler}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise EngineDead("the engine process died")
        return task.result()
    except EngineDeadError as error:
        raise EngineDead("the engine process died") from error
    finally:
        task.cancel()
