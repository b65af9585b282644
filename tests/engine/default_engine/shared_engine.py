"""An engine that outlives the servers and the modules that use it."""

from typing import Any

from engine.cudagraphs.settings import GraphsSettings
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import MODEL, settings

# Without whitespace: a JSON text of this small model is mostly whitespace otherwise.
GRAMMARS: dict[str, Any] = {
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
}


class SharedEngine(VllmEngine):
    """A server's start and stop have no effect on it."""

    def __init__(self) -> None:
        """Prompt KV is on as in production. The budget for CUDA graphs has no effect on a CPU.

        `max_logprobs` exceeds the vocabulary.
        """
        served = settings(
            prompt_kv=True, tool_parser="hermes", max_logprobs=1024, vllm_args=GRAMMARS
        )
        super().__init__(served, graphs=GraphsSettings(budget_bytes=2**26))

    async def start(self, version: str) -> None:
        assert version == "v0" and self.health().stage == "serving"

    async def stop(self) -> None:
        """Nothing: `shut_down` stops the engine."""

    async def launch(self) -> None:
        await super().start("v0")

    async def shut_down(self) -> None:
        await super().stop()

    async def reset(self) -> None:
        """Restore the weights and the version of the start, and reset the prefix cache.

        Nothing may be running.
        """
        assert self.health().stage == "serving"
        ping = await self.llm.engine_core.call_utility_async("coppice_ping")
        assert (ping["num_running"], ping["num_waiting"]) == (0, 0)
        await self.pause("keep")
        await self.update_weights(MODEL, "v0")
        await self.resume()
