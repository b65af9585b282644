"""Renderer whose engine inputs hold their images, also those that the engine has had before."""

from typing import Any

from vllm.renderers import BaseRenderer


class WholeInputs:
    """vLLM's renderer, without its cache of the images that EngineCore keeps.

    The service may refuse a request after it was rendered, or let it wait until EngineCore has
    dropped the image. Processed images are cached in this process.
    """

    def __init__(self, renderer: BaseRenderer) -> None:
        self._renderer: Any = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    @property  # type: ignore[misc]  # a name for `isinstance`
    def __class__(self) -> Any:
        """The renderer's class, for vLLM's checks with `isinstance`."""
        return type(self._renderer)

    async def render_chat_async(self, *args: Any, **options: Any) -> Any:
        return await self._renderer.render_chat_async(*args, **options | {"skip_mm_cache": True})

    async def render_cmpl_async(self, *args: Any, **options: Any) -> Any:
        return await self._renderer.render_cmpl_async(*args, **options | {"skip_mm_cache": True})
