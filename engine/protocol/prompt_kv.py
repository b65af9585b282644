"""Protocol of an engine's prompt KV export: flush of exports in progress."""

from typing import Protocol

from engine.protocol.info_and_health import EngineState


class PromptKv(EngineState, Protocol):
    """Exports of prompt KV, which samples with an `export` write.

    flush_exports: returns when every export of a previously submitted sample that has finished or
        was aborted is written or never will be. Then its slot may be reused. No write that began
        earlier is still in progress either: a status that is PENDING while the engine is paused can
        become COMMITTED only under the weights that serve after resume.
    """

    async def flush_exports(self) -> None: ...
