"""Interface between the service and its inference engine, without vLLM types.

An engine serves one model. Every method runs on the service's event loop. The fake engine of the
tests and the vLLM engine pass the same contract tests. A caller takes the part that it needs.
"""

from typing import Protocol

from engine.protocol.generation import Generation
from engine.protocol.optional_features import Features
from engine.protocol.prompt_kv import PromptKv
from engine.protocol.text import Text
from engine.protocol.weights import Weights


class Engine(Generation, Text, Weights, PromptKv, Features, Protocol):
    """Engine from its start to its stop: all parts, and its processes.

    start/stop: once each. start stamps `version` on every token. It raises StartFailed with the
        reason, which `health` reports too. stop is idempotent and leaves no process and no shared
        memory behind.
    kill: ends the engine's processes at once; all pending calls raise EngineDead. stop follows.
    """

    async def start(self, version: str) -> None: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...
