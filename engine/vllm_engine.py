"""Implementation of the engine interface with vLLM's AsyncLLM, in the service's process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from vllm.v1.engine.async_llm import AsyncLLM

from engine.drafter.service.checkpoint_dir import DrafterDir
from engine.drafter.service.drafter import Drafter
from engine.drafter.service.initial_model import open_drafter_dir
from engine.errors import LoadFailed, StartFailed
from engine.feature_stats import (
    CudaGraphStats,
    DrafterStatus,
    KeptKvStats,
    KvRetentionStats,
    SharedPrefixStats,
    SpeculationStats,
)
from engine.io import logprobs
from engine.io.chat_conversion import ChatProcessor
from engine.io.sampling_checks import SamplingChecks
from engine.io.vllm_requests import Generation
from engine.launch.arguments import WORKER_EXTENSION
from engine.launch.data_parallel import check_settings
from engine.launch.digests import synchronize_machines
from engine.launch.features import with_prediction
from engine.launch.info import (
    check_weight_transfer,
    collect_features,
    collect_info,
    eos_token_ids,
    kept_kv_reason,
    kv_support,
)
from engine.launch.machines import check_machines, check_serves
from engine.launch.model_files import resolve_served_model
from engine.launch.monitor import EngineMonitor
from engine.launch.processes import VllmProcesses, kill_processes
from engine.launch.vllm_args import check_vllm_args
from engine.protocol import DEFAULT_SAMPLING, ResponseStream
from engine.runtime.await_engine import await_engine
from engine.runtime.heartbeat import Heartbeat
from engine.runtime.leftover_files import remove_leftover_shared_memory
from engine.settings import (
    SESSION_KV_SECONDS,
    AttentionSettings,
    EngineSettings,
    GraphsSettings,
    SpeculationSettings,
)
from engine.speculation import startup as speculation_lifecycle
from engine.types import (
    AdapterInfo,
    ChatRequest,
    ChatResponse,
    Completion,
    EngineHealth,
    EngineInfo,
    FinishedListener,
    PauseMode,
    SampleRequest,
    Sampling,
    SleepLevel,
    SleepTag,
    TopLogprobRows,
    VersionSpan,
)
from engine.weights.checkpoint import NO_TENSORS, Checkpoint, read_base_checkpoint
from engine.weights.ipc_tensors import IpcTensor
from engine.weights.loaded_adapters import LoadedAdapters
from engine.weights.magnitudes import UNKNOWN, Magnitudes
from engine.weights.sleep_mode import SleepMode
from engine.weights.updates import ServedWeights
from engine.weights.validation import check_adapter, check_checkpoint


class VllmEngine:
    """The `engine.protocol.Engine` that runs vLLM. Use it from a single event loop.

    Raises StartFailed if vLLM does not accept an engine argument in the settings.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        attention: AttentionSettings | None = None,
        speculation: SpeculationSettings | None = None,
        graphs: GraphsSettings | None = None,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        check_vllm_args(settings)
        check_settings(settings, speculation or SpeculationSettings())
        check_machines(settings, speculation or SpeculationSettings())
        check_serves(settings)
        self._settings = settings
        self._requested = attention or AttentionSettings(), speculation or SpeculationSettings()
        self._speculation_settings = speculation_lifecycle.resolve_mode(
            *self._requested[1:], settings
        )
        self._heartbeat = Heartbeat(
            timeouts={
                "starting": settings.start_seconds,
                "serving": settings.step_seconds,
                "activating": settings.activation_seconds,
                "sleeping": settings.step_seconds,
            }
        )
        self._processes = VllmProcesses(
            settings,
            attention=self._requested[0],
            graphs=graphs or GraphsSettings(),
            worker_extension=worker_extension,
        )
        self._monitor = EngineMonitor(self._heartbeat, self._processes)
        self._monitor_task: asyncio.Task[None] | None = None
        self._adapters = LoadedAdapters(settings.max_adapters)
        self._generation = Generation(
            self._processes, self._adapters, num_engines=settings.data_parallel_size
        )
        self._sampling_checks = SamplingChecks(self._processes)
        self._info: EngineInfo | None = None
        self._chat: ChatProcessor
        self._weights: ServedWeights | None = None
        self._sleep_mode: SleepMode | None = None
        self._drafter_dir: DrafterDir | None = None
        self._drafter_checkpoint: Checkpoint | None = None
        self._drafter: Drafter | None = None

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def llm(self) -> AsyncLLM:
        """The AsyncLLM, for benchmarks and tests. The service does not use it."""
        return self._processes.llm

    def health(self) -> EngineHealth:
        return replace(self._heartbeat.health(), start_phase=self._processes.phases.current())

    def shared_prefix(self) -> SharedPrefixStats:
        return self._monitor.shared_prefix

    def speculation(self) -> SpeculationStats:
        return self._monitor.speculation

    def graphs(self) -> CudaGraphStats:
        return self._monitor.graphs

    def kept_kv(self) -> KeptKvStats:
        return self._monitor.kept_kv

    def session_kv(self) -> KvRetentionStats:
        return self._monitor.session_kv

    # Start and stop

    async def start(self, version: str) -> None:
        try:
            async with self._processes.phases.logged():
                await self._start(version)
        except StartFailed as error:
            self._heartbeat.mark_dead(str(error))
            raise
        except Exception as error:  # any failure has to end the wait for readiness
            self._heartbeat.mark_dead(str(error))
            raise StartFailed(f"vLLM did not start: {error}") from error

    async def _start(self, version: str) -> None:
        remove_leftover_shared_memory()
        phases = self._processes.phases
        with phases.phase("reading model files"):
            model = await asyncio.to_thread(resolve_served_model, self._settings)
            checkpoint = NO_TENSORS
            if not self._settings.has_random_weights:
                checkpoint = await asyncio.to_thread(read_base_checkpoint, model)
        self._weights = ServedWeights(
            self._processes,
            self._heartbeat,
            model,
            checkpoint,
            version=version,
            is_on_several_machines=self._settings.uses_several_machines,
        )
        self._sleep_mode = SleepMode(
            self._processes, self._heartbeat, self._weights, self._adapters
        )
        await asyncio.to_thread(self._open_drafter_dir, model, checkpoint)
        self._speculation_settings = await self._processes.start(model, self._speculation_settings)
        await self._processes.verify_plugin()
        await check_weight_transfer(self._processes, self._settings)
        await synchronize_machines(self._processes, self._settings)
        kv = await kv_support(self._processes, self._settings)
        self._chat = await asyncio.to_thread(
            ChatProcessor, self.llm, self._settings, eos_token_ids(self.llm)
        )
        features = await collect_features(self._processes, self._settings, *self._requested, kv)
        self._info = collect_info(
            self.llm,
            self._settings,
            model,
            kv,
            await kept_kv_reason(self._processes, self._settings),
            self._chat.template_variables,
            features,
        )
        with phases.phase("warming up the sampler"):
            await self._generation.warm_up(self._info.eos_token_ids)
        await self._start_drafting()
        await self._start_session_kv_retention()
        await self._monitor.start_graph_counters()
        await self._processes.set_version(version)
        self._heartbeat.set_stage("serving")
        self._monitor_task = asyncio.create_task(
            self._monitor.run(self._settings.hang_seconds, self._drafter), name="engine-monitor"
        )

    def _open_drafter_dir(self, model: Path, served: Checkpoint) -> None:
        """Open the drafter directory and set the `drafter` setting to its serving drafter."""
        if self._speculation_settings.mode != "drafter":
            return
        self._drafter_dir = open_drafter_dir(
            self._settings.cache_directory / "drafter",
            self._speculation_settings.drafter,
            model,
            served,
            ranks=self._settings.tensor_parallel_size,
        )
        self._drafter_checkpoint = read_base_checkpoint(self._drafter_dir.start)
        self._speculation_settings = self._speculation_settings.model_copy(
            update={"drafter": self._drafter_dir.start}
        )

    async def _start_drafting(self) -> None:
        settings = self._speculation_settings
        if settings.mode != "off":
            with self._processes.phases.phase("calibrating"):
                await speculation_lifecycle.start_drafting(self.llm, settings, self.info)
        if self._drafter_dir is not None:
            sleep_mode = self._sleep_mode
            assert sleep_mode is not None, "created before"
            self._drafter = Drafter(
                settings,
                self._drafter_dir,
                self.llm,
                self.info,
                lambda: sleep_mode.is_asleep,
            )
            await self._drafter.start_drafting()
        prediction = await speculation_lifecycle.predict_gain(self.llm, settings)
        self._info = with_prediction(self.info, settings.mode, prediction)

    async def _start_session_kv_retention(self) -> None:
        if fraction := self._settings.session_kv_fraction:
            method = "coppice_start_session_kv_retention"
            await self._processes.call_cores(method, fraction, SESSION_KV_SECONDS)

    async def stop(self) -> None:
        self._heartbeat.set_stage("stopping")
        if self._monitor_task is not None:
            self._monitor_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._monitor_task
        await self._processes.abort_start()
        await self._sampling_checks.close()
        await self._close_drafter()
        await self._processes.stop()

    async def _close_drafter(self) -> None:
        if self._drafter is not None:
            await self._drafter.close()
        if self._drafter_dir is not None:
            self._drafter_dir.close()

    def kill(self) -> None:
        kill_processes()

    # Tokens and text

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        return self._chat.encode(chat_request)

    def encode_chat_after(
        self, chat_request: ChatRequest, index: int, *, last_token: int
    ) -> list[int]:
        return self._chat.encode_after(chat_request, index, last_token=last_token)

    def chat_response(
        self,
        token_ids: Sequence[int],
        chat_request: ChatRequest,
        *,
        stop_reason: int | str | None = None,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> ChatResponse:
        return self._chat.chat_response(
            token_ids, chat_request, stop_reason=stop_reason, sampling=sampling
        )

    def response_stream(
        self,
        sampling: Sampling = DEFAULT_SAMPLING,
        prompt: Sequence[int] = (),
        chat_request: ChatRequest | None = None,
    ) -> ResponseStream:
        return self._chat.response_stream(sampling, prompt, chat_request)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        tokenizer = self.llm.get_tokenizer()
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return logprobs.token_texts(self.llm.get_tokenizer(), token_ids)

    def token_pieces(self, token_ids: Sequence[int]) -> list[str]:
        return logprobs.token_pieces(self.llm.get_tokenizer(), token_ids)

    # Samples

    async def check_sampling(self, sampling: Sampling, client: str = "") -> None:
        await self._sampling_checks.check(sampling, client)

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        on_finished = self._finished_observer(samples)
        return await self._generation.submit(samples, self.info.max_context_tokens, on_finished)

    def _finished_observer(self, samples: Sequence[SampleRequest]) -> FinishedListener | None:
        """Listener for the completions of these samples, if anything learns from them."""
        learner = self._drafter if self._drafter and self._drafter.is_training else None
        listener = learner.on_sample_finished if learner else None
        if all(sample.sampling.structured_outputs is None for sample in samples):
            return listener

        def observe(sample: SampleRequest, completion: Completion) -> None:
            self._sampling_checks.on_finished(sample.sampling, completion)
            if listener is not None:
                listener(sample, completion)

        return observe

    def progress(self, sample_ids: Sequence[str]) -> list[tuple[VersionSpan, ...]]:
        return self._generation.progress(sample_ids)

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        return await self._generation.score(prompt, response, adapter)

    async def top_logprobs(
        self,
        prompt: Sequence[int],
        num_top_logprobs: int,
        adapter: str | None = None,
        given: NDArray[np.int32] | None = None,
    ) -> TopLogprobRows:
        if given is not None:
            return await self._generation.given_logprobs(prompt, given, adapter)
        return await self._generation.top_logprobs(prompt, num_top_logprobs, adapter)

    async def abort(self, sample_ids: Sequence[str]) -> None:
        await self._generation.abort(sample_ids)

    async def flush_exports(self) -> None:
        """Wait for exports by calling all workers, which run earlier steps and aborts first."""
        if self.info.kv_format is not None:
            await self._processes.call_workers("coppice_flush_exports")

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
        """Pause between two steps.

        vLLM's `pause_generation` then sleeps for 20 ms, so that its caller receives the last
        outputs of ended requests first. The mode `keep` ends none, and EngineCore sets the weights
        version of each output.
        """
        if mode == "keep" and not recompute:
            pausing = self.llm.engine_core.pause_scheduler_async(mode, clear_cache=False)
        else:
            pausing = self.llm.pause_generation(mode=mode, clear_cache=recompute)
        await await_engine(self.llm, pausing)

    async def resume(self) -> None:
        await await_engine(self.llm, self.llm.resume_generation())

    async def reset_prefix_cache(self) -> None:
        await self._processes.call_cores("coppice_reset_prefix_cache")

    async def release_session_kv(self, session_ids: Sequence[str]) -> None:
        await self._processes.call_cores("coppice_release_session_kv", list(session_ids))

    # Weights and adapters

    @property
    def _served_weights(self) -> ServedWeights:
        assert self._weights is not None, "the engine has not started"
        return self._weights

    def check_weights(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None:
        self._served_weights.check(path, dtype=self.info.dtype, magnitudes=magnitudes)

    def check_tensors(self, tensors: Sequence[IpcTensor]) -> None:
        self._served_weights.check_tensors(tensors)

    async def update_weights(self, path: Path, version: str, *, keep_kv: bool = False) -> int:
        async with self._loading():
            num_kept = await self._served_weights.update(path, version, keep_kv=keep_kv)
        return num_kept

    async def open_transfer(self, tensors: Sequence[IpcTensor]) -> None:
        await self._served_weights.open_transfer(tensors)

    async def close_transfer(self) -> None:
        await self._served_weights.close_transfer()

    async def transfer_weights(self, version: str, *, keep_kv: bool = False) -> int:
        async with self._loading():
            num_kept = await self._served_weights.transfer(version, keep_kv=keep_kv)
        return num_kept

    @asynccontextmanager
    async def _loading(self) -> AsyncIterator[None]:
        """Context manager of a load of weights, which has failed if LoadFailed leaves it."""
        assert self._sleep_mode is not None, "the engine has not started"
        try:
            yield
        except LoadFailed:
            self._sleep_mode.restore_stage()
            raise
        self._sleep_mode.on_weights_loaded()

    async def sleep(self, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None:
        assert self._sleep_mode is not None, "the engine has not started"
        await self._sleep_mode.sleep(level, tags)

    async def wake(self, tags: AbstractSet[SleepTag]) -> str | None:
        assert self._sleep_mode is not None, "the engine has not started"
        return await self._sleep_mode.wake(tags)

    def check_adapter(self, path: Path) -> AdapterInfo:
        base, max_rank = self._served_weights.checkpoint, self.info.max_adapter_rank
        return check_adapter(base, path, max_rank=max_rank, dtype=self.info.dtype)

    async def load_adapter(self, label: str, path: Path) -> None:
        await self._adapters.load(self._processes, label, path)

    async def unload_adapter(self, label: str) -> None:
        await self._adapters.unload(self._processes, label)

    # The drafter

    def drafter(self) -> DrafterStatus | None:
        return None if self._drafter is None else self._drafter.status()

    def drafter_file(self) -> Path:
        assert self._drafter is not None, "the engine has no drafter"
        return self._drafter.file

    def check_drafter(self, path: Path) -> None:
        assert self._drafter_checkpoint is not None, "the engine has no drafter"
        check_checkpoint(self._drafter_checkpoint, path, dtype=self.info.dtype)

    async def submit_drafter(self, path: Path, version: str) -> None:
        assert self._drafter is not None, "the engine has no drafter"
        await self._drafter.submit(path, version)
