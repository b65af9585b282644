"""Implementation of the engine interface with vLLM's AsyncLLM, in the service's process.

Each sample is one request with n=1, as in vLLM's own fan-out of larger n. So each sample can be
aborted, versioned and drafted separately. Siblings share their prompt's KV through prefix caching.
They are submitted in one iteration of the event loop so that they are scheduled together.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engine.attention.counters import aggregate_ranks
from engine.cudagraphs.counters import aggregate_ranks as aggregate_graph_ranks
from engine.cudagraphs.from_settings import plan_for_start
from engine.cudagraphs.planner import Plan
from engine.drafter.service.bootstrap import open_drafter_dir
from engine.drafter.service.checkpoint_dir import DrafterDir
from engine.drafter.service.drafter import Drafter
from engine.errors import EngineDead, LoadFailed, RequestRefused, StartFailed
from engine.io import token_text
from engine.io.chat import ChatProcessor
from engine.io.score_tokens import prompt_logprobs_of
from engine.io.vllm_types import (
    PendingSample,
    parse_top_logprobs,
    sampled_logprobs,
    sampling_params,
)
from engine.launch.arguments import WORKER_EXTENSION
from engine.launch.info import collect_info, kv_support
from engine.launch.model_files import resolve_model
from engine.launch.processes import engine_processes, kill_processes, launch
from engine.runtime import file_ownership
from engine.runtime.await_engine import await_engine
from engine.runtime.file_ownership import TempDir
from engine.runtime.heartbeat import Heartbeat
from engine.settings import AttentionSettings, EngineSettings, GraphsSettings, SpeculationSettings
from engine.speculation import lifecycle as speculation_start
from engine.speculation.counters import to_speculation_stats
from engine.stats import CudaGraphStats, DrafterStatus, SharedPrefixStats, SpeculationStats
from engine.types import (
    AdapterInfo,
    ChatRequest,
    ChatResponse,
    Completion,
    EngineHealth,
    EngineInfo,
    PauseMode,
    SampleRequest,
    TopLogprobs,
)
from engine.weights.checkpoint import Checkpoint, read_base_checkpoint
from engine.weights.updates import LoadedAdapters
from engine.weights.validation import check_adapter, check_checkpoint

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 30.0
KILL_RETRY_SECONDS = 0.5


class VllmEngine:
    """An `engine.protocol.Engine`. Started and driven from one event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        attention: AttentionSettings | None = None,
        speculation: SpeculationSettings | None = None,
        graphs: GraphsSettings | None = None,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        self._settings = settings
        self._attention = attention or AttentionSettings()
        self._speculation_settings = speculation_start.resolve_mode(
            speculation or SpeculationSettings(), settings
        )
        self._shared_prefix = SharedPrefixStats()
        self._speculation = SpeculationStats()
        self._graph_settings = graphs or GraphsSettings()
        self._plan: Plan | None = None
        self._graphs = CudaGraphStats()
        self._worker_extension = worker_extension
        self._heartbeat = Heartbeat(
            timeouts={
                "starting": settings.start_seconds,
                "serving": settings.step_seconds,
                "activating": settings.activation_seconds,
            }
        )
        self._background_task: asyncio.Task[None] | None = None
        self._start_future: asyncio.Future[None] | None = None
        self._temp_dir: TempDir | None = None
        self._llm: AsyncLLM | None = None
        self._info: EngineInfo | None = None
        self._chat: ChatProcessor
        self._base_checkpoint: Checkpoint | None = None
        self._serving_path: Path | None = None
        self._drafter_dir: DrafterDir | None = None
        self._drafter_checkpoint: Checkpoint | None = None
        self._drafter: Drafter | None = None
        self._adapters = LoadedAdapters(settings.max_adapters)

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def llm(self) -> AsyncLLM:
        """The AsyncLLM, for benchmarks and tests. The service does not use it."""
        if self._llm is None:
            raise EngineDead("the engine is not running")
        return self._llm

    def health(self) -> EngineHealth:
        return self._heartbeat.health()

    def shared_prefix(self) -> SharedPrefixStats:
        return self._shared_prefix

    def speculation(self) -> SpeculationStats:
        return self._speculation

    def graphs(self) -> CudaGraphStats:
        return self._graphs

    # Start and stop

    async def start(self, version: str) -> None:
        try:
            await self._start(version)
        except Exception as error:  # any failure has to end the wait for readiness
            self._heartbeat.mark_dead(str(error))
            if isinstance(error, StartFailed):
                raise
            raise StartFailed(f"vLLM did not start: {error}") from error

    async def _start(self, version: str) -> None:
        file_ownership.remove_leftover_shared_memory()
        self._serving_path = await asyncio.to_thread(
            resolve_model, self._settings.model, self._settings.revision
        )
        self._base_checkpoint = await asyncio.to_thread(read_base_checkpoint, self._serving_path)
        await asyncio.to_thread(self._open_drafter_dir, self._serving_path, self._base_checkpoint)
        self._start_future = asyncio.ensure_future(
            asyncio.to_thread(self._start_vllm, self._serving_path)
        )
        await asyncio.shield(self._start_future)
        await self._verify_plugin()
        kv = await kv_support(self.llm, self._settings)
        self._chat = await asyncio.to_thread(ChatProcessor, self.llm, self._settings)
        self._info = collect_info(
            self.llm, self._settings, self._serving_path, kv, self._chat.template_variables
        )
        await self._warm_up()
        await speculation_start.start_drafting(self.llm, self._speculation_settings, self._info)
        await self._start_drafter()
        await self._start_graph_counters()
        await await_engine(self.llm, self.llm.update_weight_version(version))
        self._heartbeat.set_stage("serving")
        self._background_task = asyncio.create_task(
            self._run_background_tasks(), name="engine-watch"
        )

    def _start_vllm(self, model: Path) -> None:
        self._temp_dir = TempDir()
        self._plan = plan_for_start(
            self._settings,
            self._graph_settings,
            self._speculation_settings,
            model,
            on_cpu=current_platform.is_cpu(),
        )
        self._llm = launch(
            self._settings,
            model,
            attention=self._attention,
            speculation=self._speculation_settings,
            graphs=self._plan,
            worker_extension=self._worker_extension,
            temp_dir=self._temp_dir.path,
        )

    def _open_drafter_dir(self, model: Path, served: Checkpoint) -> None:
        """Open the drafter directory and set its serving drafter as vLLM's `drafter` setting."""
        if self._speculation_settings.mode != "drafter":
            return
        self._drafter_dir = open_drafter_dir(
            self._speculation_settings.drafter_directory,
            self._speculation_settings.drafter,
            model,
            served,
            ranks=self._settings.tensor_parallel_size,
        )
        self._drafter_checkpoint = read_base_checkpoint(self._drafter_dir.start)
        self._speculation_settings = self._speculation_settings.model_copy(
            update={"drafter": self._drafter_dir.start}
        )

    async def _start_drafter(self) -> None:
        if self._drafter_dir is not None:
            self._drafter = Drafter(
                self._speculation_settings, self._drafter_dir, self.llm, self.info
            )
            await self._drafter.start_drafting()

    async def _start_graph_counters(self) -> None:
        if self._plan is None:
            return
        ranks = await await_engine(
            self.llm, self.llm.collective_rpc("coppice_reset_graph_counters")
        )
        if None in ranks:
            raise StartFailed(
                "graphs.budget_bytes needs vLLM's second model runner, which is not used"
            )
        self._graphs = aggregate_graph_ranks(ranks)

    async def _verify_plugin(self) -> None:
        """Check that the plugin is active: vLLM only logs a plugin that fails to load."""
        try:
            await self._call_utility("coppice_ping")
        except Exception as error:
            raise StartFailed("the Coppice plugin is not active in the engine process") from error

    async def _warm_up(self) -> None:
        """Generate once, because the first generation compiles for seconds."""
        token = self.info.eos_token_ids[0] if self.info.eos_token_ids else 0
        params = SamplingParams(
            max_tokens=4, top_p=0.9, top_k=20, ignore_eos=True, logprobs=0, detokenize=False
        )
        async for _ in self.llm.generate(tokens_input([token] * 4), params, "warm-up"):
            pass

    async def _run_background_tasks(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_heartbeat())
            tasks.create_task(self._kill_if_hung())
            if self._drafter is not None:
                tasks.create_task(self._drafter.run())

    async def _run_heartbeat(self) -> None:
        try:
            await self._heartbeat.run(self._ping, engine_processes())
        except EngineDead as error:
            self._heartbeat.mark_dead(str(error))
        except Exception as error:  # without a heartbeat the engine counts as dead
            log.exception("the heartbeat failed")
            self._heartbeat.mark_dead(f"the heartbeat failed: {error}")

    async def _ping(self) -> None:
        ping = await self._call_utility("coppice_ping")
        self._shared_prefix = aggregate_ranks(ping["shared_prefix"])
        drafter_counters = ping["drafter"]
        speculation_counters = (
            drafter_counters["speculation"] if drafter_counters else ping["speculation"][0]
        )
        self._speculation = to_speculation_stats(speculation_counters)
        if self._drafter is not None:
            self._drafter.on_ping(drafter_counters, ping["num_running"])
        self._graphs = aggregate_graph_ranks(ping["graphs"])

    async def _kill_if_hung(self) -> None:
        """Kill an engine that hangs for too long, so that all pending calls fail."""
        await self._heartbeat.watch(self._settings.hang_seconds)
        log.error("%s: the engine is killed", self._heartbeat.health().reason)
        self._heartbeat.mark_dead(f"it hung: {self._heartbeat.health().reason}")
        self.kill()

    async def stop(self) -> None:
        self._heartbeat.set_stage("stopping")
        if self._background_task is not None:
            self._background_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._background_task
        await self._abort_start()
        await self._close_drafter()
        await self._save_drafts()
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # or it would report the shutdown as a failure
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_SECONDS)
        await asyncio.to_thread(self._clean_up)

    async def _close_drafter(self) -> None:
        if self._drafter is not None:
            await self._drafter.close()
        if self._drafter_dir is not None:
            self._drafter_dir.close()

    async def _save_drafts(self) -> None:
        """Save the draft store, unless the engine hangs."""
        if self._llm is not None and self._heartbeat.stage == "stopping" and self._info is not None:
            with suppress(EngineDead, TimeoutError):
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await speculation_start.stop_drafting(self._llm, self._speculation_settings)

    def _clean_up(self) -> None:
        """Remove files that vLLM's processes leave behind when they are killed."""
        if self._temp_dir is not None:
            self._temp_dir.close()
        file_ownership.remove_leftover_shared_memory()

    async def _abort_start(self) -> None:
        """Kill vLLM's processes until the start in progress fails; it cannot be cancelled."""
        while self._start_future is not None and not self._start_future.done():
            kill_processes()
            await asyncio.wait({self._start_future}, timeout=KILL_RETRY_SECONDS)

    def kill(self) -> None:
        kill_processes()

    # Tokens and text

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        return self._chat.encode(chat_request)

    def chat_response(self, token_ids: Sequence[int], chat_request: ChatRequest) -> ChatResponse:
        return self._chat.chat_response(token_ids, chat_request)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        tokenizer = self.llm.get_tokenizer()
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return token_text.texts(self.llm.get_tokenizer(), token_ids)

    def token_pieces(self, token_ids: Sequence[int]) -> list[str]:
        return token_text.pieces(self.llm.get_tokenizer(), token_ids)

    # Samples

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        pending: list[Awaitable[Completion]] = []
        try:
            for sample in samples:
                params = sampling_params(sample, self.info.max_context_tokens)
                queue = await self.llm.add_request(
                    sample.id,
                    tokens_input(list(sample.prompt_token_ids), cache_salt=sample.cache_salt),
                    params,
                    lora_request=self._adapters.request(sample.adapter),
                    priority=sample.priority,
                )
                learner = self._drafter if self._drafter and self._drafter.is_training else None
                on_finished = (
                    functools.partial(learner.on_sample_finished, sample) if learner else None
                )
                pending.append(PendingSample(queue, sample, on_finished))
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        except (VLLMClientError, ValueError, RequestRefused) as error:
            await self.abort([sample.id for sample in samples])
            raise RequestRefused(str(error)) from error
        return pending

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        lora_request = self._adapters.request(adapter)
        flat = await prompt_logprobs_of(self.llm, [*prompt, *response], lora_request)
        return sampled_logprobs(flat)[len(prompt) :]

    async def top_logprobs(
        self, prompt: Sequence[int], num_top_logprobs: int, adapter: str | None = None
    ) -> list[TopLogprobs]:
        lora_request = self._adapters.request(adapter)
        return parse_top_logprobs(
            await prompt_logprobs_of(
                self.llm, prompt, lora_request, num_top_logprobs=num_top_logprobs
            )
        )

    async def abort(self, sample_ids: Sequence[str]) -> None:
        with suppress(EngineDead, EngineDeadError):
            await self.llm.abort(list(sample_ids))

    async def flush_exports(self) -> None:
        """Call all workers; the call runs after every abort and step that was sent before it."""
        if self.info.kv_format is not None:
            await await_engine(self.llm, self.llm.collective_rpc("coppice_flush_exports"))

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
        await await_engine(self.llm, self.llm.pause_generation(mode=mode, clear_cache=recompute))

    async def resume(self) -> None:
        await await_engine(self.llm, self.llm.resume_generation())

    async def reset_prefix_cache(self) -> None:
        await self._call_utility("coppice_reset_prefix_cache")

    # Weights

    def check_weights(self, path: Path) -> None:
        assert self._base_checkpoint is not None, "the engine has not started"
        check_checkpoint(self._base_checkpoint, path, dtype=self.info.dtype)

    async def update_weights(self, path: Path, version: str) -> None:
        self._heartbeat.set_stage("activating")
        previous = str(self._serving_path)
        load = self.llm.collective_rpc("coppice_load_weights", args=(str(path), previous))
        results = await await_engine(self.llm, load)
        failed = [result for result in results if not result["ok"]]
        if not all(result["restored"] for result in failed):
            self._heartbeat.mark_dead("the weights are half loaded")
            raise EngineDead("loading failed and the previous weights could not be put back")
        # Also after a restore: no prefix may match KV of the failed weights.
        await self.reset_prefix_cache()
        if failed:
            self._heartbeat.set_stage("serving")
            raise LoadFailed("loading broke off; the previous weights serve on")
        await await_engine(self.llm, self.llm.update_weight_version(version))
        self._serving_path = path
        self._heartbeat.set_stage("serving")

    # The drafter

    def drafter(self) -> DrafterStatus | None:
        return None if self._drafter is None else self._drafter.status()

    def drafter_file(self) -> Path:
        assert self._drafter is not None, "there is one"
        return self._drafter.file

    def check_drafter(self, path: Path) -> None:
        assert self._drafter_checkpoint is not None, "there is one"
        check_checkpoint(self._drafter_checkpoint, path, dtype=self.info.dtype)

    async def submit_drafter(self, path: Path, version: str) -> None:
        assert self._drafter is not None, "there is one"
        await self._drafter.submit(path, version)

    # Adapters

    def check_adapter(self, path: Path) -> AdapterInfo:
        assert self._base_checkpoint is not None, "the engine has not started"
        rank = self.info.max_adapter_rank
        return check_adapter(self._base_checkpoint, path, max_rank=rank, dtype=self.info.dtype)

    async def load_adapter(self, label: str, path: Path) -> None:
        await self._adapters.load(self.llm, label, path)

    async def unload_adapter(self, label: str) -> None:
        await self._adapters.unload(self.llm, label)

    async def _call_utility(self, method: str) -> Any:
        return await await_engine(self.llm, self.llm.engine_core.call_utility_async(method))
