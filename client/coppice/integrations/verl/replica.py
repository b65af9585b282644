"""Rollout replica for verl that connects to a running Coppice server instead of starting one."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from coppice.client import AsyncRollouts
from coppice.errors import Unsupported
from coppice.integrations.verl.generation import Generation, LengthLimits
from coppice.integrations.verl.publisher import MERGE_ADAPTER, ServerList

log = logging.getLogger("coppice")


class CoppiceServer:
    """Ray actor that forwards verl's method calls to one Coppice server; it needs no GPU.

    `launch` must be called first.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        prompt_length: int,
        response_length: int,
        *,
        return_support: bool = False,
    ) -> None:
        self._url = url
        self._return_support = return_support
        self._key = key
        self._prompt_length = prompt_length
        self._response_length = response_length

    async def launch(self, seconds: float) -> str:
        """Waits up to `seconds` until the Coppice server is ready; returns its host and port."""
        rollouts = AsyncRollouts(self._url, api_key=self._key)
        await rollouts.wait_until_ready(seconds)
        engine = (await rollouts.status()).engine
        assert engine is not None, "a server that is ready has an engine"
        length_limits = LengthLimits(
            prompt=self._prompt_length,
            response=self._response_length,
            context=engine.max_context_tokens,
        )
        self._generation = Generation(rollouts, length_limits, return_support=self._return_support)
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
            raise Unsupported("only text models are supported: omit images, videos and audio")
        prompt = normalize_token_ids(prompt_ids)
        output = await self._generation.generate(request_id, prompt, sampling_params, priority)
        return TokenOutput(**asdict(output))

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """Aborts all running requests.

        The prefix cache needs no reset, because prefixes never match across weights versions.
        """
        ended = await self._generation.abort_all(reject=reject_request)
        return {"aborted_count": len(ended), "request_ids": ended}

    async def resume_generation(self) -> None:
        self._generation.resume()

    async def clear_kv_cache(self) -> None:
        """Does nothing, because the activation of weights already resets the prefix cache."""

    async def release_kv_cache(self) -> None:
        """Does nothing, because the server does not share its GPU with the trainer."""

    async def resume_kv_cache(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass

    async def sleep(self) -> None:
        pass

    async def start_profile(self, **_: Any) -> None:
        log.warning("profiling of %s is not supported: use its /metrics and traces", self._url)

    async def stop_profile(self) -> None:
        pass


class CoppiceReplica(RolloutReplica):  # type: ignore[misc]
    """verl rollout replica that uses a Coppice server and reserves no GPU in Ray.

    verl's number of rollout GPUs sets the number of replicas.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.is_reward_model:
            raise Unsupported("reward models are not served: use vllm or sglang for this model")
        lora = self.model_config.get("lora") or {}
        rank = self.model_config.get("lora_rank", 0) or lora.get("rank", 0)
        if rank and not lora.get("merge", False):
            raise Unsupported(MERGE_ADAPTER)
        self._server_list = ServerList.of(self.config.engine_kwargs)

    async def init_standalone(self) -> None:
        """Creates the placeholder worker that verl requires for weight updates, without a GPU."""
        if self.config.checkpoint_engine.backend != "coppice":
            raise Unsupported(
                "a separate trainer must send weights with checkpoint_engine.backend=coppice"
            )
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"coppice_{self.replica_rank}{self.name_suffix}"
        self.resource_pool = RayResourcePool(
            [1], use_gpu=False, max_colocate_count=1, name_prefix=f"{name}_pool"
        )
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"{name}_worker",
            use_gpu=False,
            device_name=get_device_name(),
        )
        self.workers = group.workers
        await self.launch_servers()

    async def init_colocated(self, resource_pool: RayResourcePool) -> None:
        """Uses the server of a teacher, whose resource pool verl requires but nothing occupies."""
        self.rollout_mode = RolloutMode.COLOCATED
        self.resource_pool = resource_pool
        await self.launch_servers()

    async def launch_servers(self) -> None:
        handle = ray.remote(CoppiceServer)
        model = "teacher" if self.is_teacher_model else "server"
        options = handle.options(
            name=f"coppice_{model}_{self.replica_rank}{self.name_suffix}",
            num_cpus=0,
            max_concurrency=self.max_concurrency,
        )
        server = options.remote(
            self._server_list.url(self.replica_rank),
            self._server_list.key(),
            self.config.prompt_length,
            self.config.response_length,
            return_support=self._server_list.return_support,
        )
        self._server_address = await server.launch.remote(self.config.server.max_start_wait_time)
        self._server_handle = server
        self.servers = [server]
