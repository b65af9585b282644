"""Loading of the images in prompts: from data: URLs, within limits, for vLLM's renderer.

A stranger's request must neither make the server fetch an address of its network nor fill its
memory with a small file of many pixels.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from typing import Any, Final, NoReturn

import vllm.envs as envs
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO

MAX_PIXELS: Final = 2**26
"""Limit of a request's images together; a decoded pixel takes 3 bytes."""
MIN_PIXELS: Final = 2**16
"""Each image counts as at least so many pixels: models enlarge small ones."""
MAX_DECODING: Final = 2
"""Number of requests whose images are decoded at the same time."""
_HOW = "send images as data: URLs"


class ImageBudget:
    """Limit of the pixels of one request, and its turn to decode them. Entered once."""

    def __init__(self, turns: asyncio.Semaphore | None = None) -> None:
        self.num_pixels = 0
        self._lock = threading.Lock()
        self._turns = turns
        self._turn: asyncio.Task[Any] | None = None

    def add(self, num_pixels: int) -> None:
        """Count an image, before it is decoded. Called from any thread."""
        with self._lock:
            self.num_pixels += max(num_pixels, MIN_PIXELS)
            if self.num_pixels > MAX_PIXELS:
                raise refusal(
                    f"the images of a request may have at most {MAX_PIXELS} pixels together, "
                    f"where each one counts as at least {MIN_PIXELS}"
                )

    async def wait_turn(self) -> None:
        if self._turns is None:
            return
        if self._turn is None:
            self._turn = asyncio.ensure_future(self._turns.acquire())
        await asyncio.shield(self._turn)

    def end_turn(self) -> None:
        """Let another request decode its images; a no-op if this one has none."""
        turn, self._turn = self._turn, None
        if turn is not None and not turn.cancel() and not turn.cancelled():
            assert self._turns is not None
            self._turns.release()


_budget = ContextVar[ImageBudget | None]("image_budget", default=None)


@contextmanager
def within(budget: ImageBudget) -> Iterator[ImageBudget]:
    """Count the images that are loaded in this context, and in the tasks that it starts."""
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)
        budget.end_turn()


def refusal(reason: str) -> VLLMValidationError:
    return VLLMValidationError(reason, parameter="image_url")


class _CheckedImages(ImageMediaIO):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's decoder of images, which checks the size of each one before."""

    def __init__(self, budget: ImageBudget, **options: Any) -> None:
        super().__init__(**options)
        self._budget = budget

    def load_bytes(self, data: bytes) -> Any:
        try:
            with open_image(BytesIO(data)) as image:
                num_pixels, is_animated = image.width * image.height, _is_animated(image)
            if is_animated:
                raise refusal("an image with several frames: send one frame as an image")
            self._budget.add(num_pixels)
            return super().load_bytes(data)
        except VLLMError:
            raise
        except Exception as error:  # a decoder may raise anything
            raise refusal(f"an image cannot be read: {type(error).__name__}") from error


def _is_animated(image: Any) -> bool:
    return bool(getattr(image, "is_animated", False))


class _WithoutRedirects(HTTPConnection):  # type: ignore[misc]
    """Connection that stays at the address that was checked."""

    def get_bytes(self, url: str, **options: Any) -> bytes:
        content: bytes = super().get_bytes(url, **options | {"allow_redirects": False})
        return content

    async def async_get_bytes(self, url: str, **options: Any) -> bytes:
        options |= {"allow_redirects": False}
        content: bytes = await super().async_get_bytes(url, **options)
        return content


_connection = _WithoutRedirects()


@MEDIA_CONNECTOR_REGISTRY.register("http")
class ImageConnector(MediaConnector):  # type: ignore[misc]
    """vLLM's default connector, for data: URLs, and for addresses that the operator allows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"connection": _connection})

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        self._check(url)
        try:
            return super().load_from_url(url, media_io, **options)
        except (ValueError, NotImplementedError) as error:
            raise _of_url(error) from error

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        self._check(url)
        try:
            return await super().load_from_url_async(url, media_io, **options)
        except (ValueError, NotImplementedError) as error:
            raise _of_url(error) from error

    def _check(self, url: str) -> None:
        scheme = url[:5].lower()
        if scheme == "data:" or (scheme.startswith("http") and self.allowed_media_domains):
            return
        raise refusal(f"{_HOW}: this server fetches no other address")

    def fetch_image(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        images = self._images(_budget.get() or ImageBudget(), image_mode)
        return self.load_from_url(image_url, images, fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT)

    async def fetch_image_async(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        budget = _budget.get() or ImageBudget()
        await budget.wait_turn()
        return await self.load_from_url_async(
            image_url,
            self._images(budget, image_mode),
            fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT,
        )

    def _images(self, budget: ImageBudget, image_mode: str | None) -> _CheckedImages:
        options = {"image_mode": image_mode} | self.media_io_kwargs.get("image", {})
        return _CheckedImages(budget, **options)

    def fetch_audio(self, *_: Any, **__: Any) -> NoReturn:
        raise VLLMValidationError("audio is not supported: send text and images")

    def fetch_video(self, *_: Any, **__: Any) -> NoReturn:
        raise VLLMValidationError("video is not supported: send text and images")

    async def fetch_audio_async(self, *_: Any, **__: Any) -> NoReturn:
        self.fetch_audio()

    async def fetch_video_async(self, *_: Any, **__: Any) -> NoReturn:
        self.fetch_video()


def _of_url(error: Exception) -> Exception:
    is_refusal: bool = isinstance(error, VLLMError)
    return error if is_refusal else refusal(str(error))
