"""Ray actor for one server; it needs no GPU."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import TokenOutput

from coppice.client import AsyncRollouts
from coppice.errors import Unsupported
from coppice.verl.generation import Generation
from coppice.verl.sampling_options import LengthLimits

log = logging.getLogger("coppice")


class CoppiceServer:
    """Server handle with the methods that verl calls. `launch` must be called first."""

    def __init__(self, url: str, key: str | None, prompt_length: int, response_length: int) -> None:
        self._url = url
        self._key = key
        self._prompt_length = prompt_length
        self._response_length = response_length

    async def launch(self, seconds: float) -> str:
        """Waits up to `seconds` until the server is ready; returns its host and port."""
        rollouts = AsyncRollouts(self._url, api_key=self._key)
        await rollouts.wait_until_ready(seconds)
        engine = (await rollouts.status()).engine
        assert engine is not None, "a server that is ready has an engine"
        length_limits = LengthLimits(
            prompt=self._prompt_length,
            response=self._response_length,
            context=engine.max_context_tokens,
        )
        self._generation = Generation(rollouts, length_limits)
        return urlsplit(self._url).netloc.rpartition("@")[2]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        if image_data or video_data or audio_data:
            raise Unsupported("only text models are served: leave images, videos and audio out")
        prompt = normalize_token_ids(prompt_ids)
        output = await self._generation.generate(request_id, prompt, sampling_params, priority)
        return TokenOutput(**asdict(output))

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """Aborts all requests. No cache reset is needed: prefixes never match across versions."""
        ended = await self._generation.abort_all(reject=reject_request)
        return {"aborted_count": len(ended), "request_ids": ended}

    async def resume_generation(self) -> None:
        self._generation.resume()

    async def clear_kv_cache(self) -> None:
        """Does nothing: activation of weights already resets the prefix cache."""

    async def release_kv_cache(self) -> None:
        """Does nothing, like the methods below: the server does not share its GPU."""

    async def resume_kv_cache(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass

    async def sleep(self) -> None:
        pass

    async def start_profile(self, **_: Any) -> None:
        log.warning("%s is not profiled from here: see its /metrics and traces", self._url)

    async def stop_profile(self) -> None:
        pass
