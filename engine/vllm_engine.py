"""The engine protocol over vLLM's AsyncLLM, which lives inside the service's process.

A sample is one single-sample engine request: vLLM would fan a larger n out the same way, and one
request a sample can be aborted, versioned and drafted for alone. Siblings share their prompt's
cache through prefix caching, and enter in one turn of the loop, to be scheduled side by side.
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

from engine.adapters.registry import LoadedAdapters
from engine.adapters.validation import check_adapter
from engine.attention.counters import over_ranks
from engine.cudagraphs.counters import over_ranks as graphs_over_ranks
from engine.cudagraphs.from_settings import plan_for_start
from engine.cudagraphs.planner import Plan
from engine.drafter.service.bootstrap import open_folder
from engine.drafter.service.checkpoint_dir import Folder
from engine.drafter.service.drafter import Drafter
from engine.errors import EngineDead, LoadFailed, RequestRefused, StartFailed
from engine.io import token_text
from engine.io.chat import Chat
from engine.io.prompt_logprobs import scored
from engine.io.vllm_types import Pending, first_logprobs, places, sampling_params
from engine.launch.arguments import WORKER_EXTENSION
from engine.launch.info import gather_facts, kv_support
from engine.launch.model_files import locate
from engine.launch.processes import engine_processes, kill_processes, launch
from engine.protocol import (
    AdapterForm,
    Completion,
    Conversation,
    DrafterStatus,
    EngineFacts,
    GraphCounts,
    PauseMode,
    Place,
    Pulse,
    Reply,
    SampleRequest,
    SharedPrefixCounts,
    SpeculationCounts,
)
from engine.runtime import shared_memory
from engine.runtime.heartbeat import Heartbeat
from engine.runtime.rpc import answered
from engine.runtime.temp_dir import Scratch
from engine.settings import AttentionSettings, EngineSettings, GraphsSettings, SpeculationSettings
from engine.speculation import lifecycle as speculation_start
from engine.speculation.counters import counts_of
from engine.weights.checkpoint import Checkpoint, read_served
from engine.weights.validation import check

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 30.0
KILL_AGAIN_SECONDS = 0.5


class VllmEngine:
    """Contract: engine.protocol.Engine. Started and driven from one event loop."""

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
        self._speculating = speculation_start.resolved(
            speculation or SpeculationSettings(), settings
        )
        self._shared_prefix = SharedPrefixCounts()
        self._speculation = SpeculationCounts()
        self._graph_settings = graphs or GraphsSettings()
        self._plan: Plan | None = None
        self._graphs = GraphCounts()
        self._worker_extension = worker_extension
        self._heart = Heartbeat(
            bounds={
                "starting": settings.start_seconds,
                "serving": settings.step_seconds,
                "activating": settings.activation_seconds,
            }
        )
        self._watching: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self._scratch: Scratch | None = None
        self._llm: AsyncLLM | None = None
        self._facts: EngineFacts | None = None
        self._chat: Chat
        self._first: Checkpoint | None = None
        self._serving_path: Path | None = None
        self._drafters: Folder | None = None
        self._first_drafter: Checkpoint | None = None
        self._drafter: Drafter | None = None
        self._adapters = LoadedAdapters(settings.max_adapters)

    @property
    def facts(self) -> EngineFacts:
        assert self._facts is not None, "the engine has not started"
        return self._facts

    @property
    def llm(self) -> AsyncLLM:
        """vLLM itself, for benchmarks and tests; the service never touches it."""
        if self._llm is None:
            raise EngineDead("the engine is not running")
        return self._llm

    def pulse(self) -> Pulse:
        return self._heart.pulse()

    def shared_prefix(self) -> SharedPrefixCounts:
        return self._shared_prefix

    def speculation(self) -> SpeculationCounts:
        return self._speculation

    def graphs(self) -> GraphCounts:
        return self._graphs

    # Start and stop

    async def start(self, version: str) -> None:
        try:
            await self._start(version)
        except Exception as error:  # whatever it was: nobody may wait for an engine that never is
            self._heart.died(str(error))
            if isinstance(error, StartFailed):
                raise
            raise StartFailed(f"vLLM did not start: {error}") from error

    async def _start(self, version: str) -> None:
        shared_memory.sweep()
        self._serving_path = await asyncio.to_thread(
            locate, self._settings.model, self._settings.revision
        )
        self._first = await asyncio.to_thread(read_served, self._serving_path)
        await asyncio.to_thread(self._open_drafters, self._serving_path, self._first)
        self._starting = asyncio.ensure_future(
            asyncio.to_thread(self._start_vllm, self._serving_path)
        )
        await asyncio.shield(self._starting)
        await self._verify_plugin()
        kv = await kv_support(self.llm, self._settings)
        self._chat = await asyncio.to_thread(Chat, self.llm, self._settings)
        self._facts = gather_facts(
            self.llm, self._settings, self._serving_path, kv, self._chat.template_variables
        )
        await self._warm_up()
        await speculation_start.begin(self.llm, self._speculating, self._facts)
        await self._begin_drafter()
        await self._begin_graphs()
        await answered(self.llm, self.llm.update_weight_version(version))
        self._heart.enter("serving")
        self._watching = asyncio.create_task(self._watched(), name="engine-watch")

    def _start_vllm(self, model: Path) -> None:
        self._scratch = Scratch()
        self._plan = plan_for_start(
            self._settings,
            self._graph_settings,
            self._speculating,
            model,
            on_cpu=current_platform.is_cpu(),
        )
        self._llm = launch(
            self._settings,
            model,
            attention=self._attention,
            speculation=self._speculating,
            graphs=self._plan,
            worker_extension=self._worker_extension,
            scratch=self._scratch.path,
        )

    def _open_drafters(self, model: Path, served: Checkpoint) -> None:
        """vLLM is told of the one that serves, as if it had been given."""
        if self._speculating.mode != "drafter":
            return
        self._drafters = open_folder(
            self._speculating.drafter_directory,
            self._speculating.drafter,
            model,
            served,
            ranks=self._settings.tensor_parallel_size,
        )
        self._first_drafter = read_served(self._drafters.start)
        self._speculating = self._speculating.model_copy(update={"drafter": self._drafters.start})

    async def _begin_drafter(self) -> None:
        if self._drafters is not None:
            self._drafter = Drafter(self._speculating, self._drafters, self.llm, self.facts)
            await self._drafter.begin()

    async def _begin_graphs(self) -> None:
        if self._plan is None:
            return
        ranks = await answered(self.llm, self.llm.collective_rpc("coppice_begin_graphs"))
        if None in ranks:
            raise StartFailed(
                "graphs.budget_bytes needs vLLM's second model runner, which is not used"
            )
        self._graphs = graphs_over_ranks(ranks)

    async def _verify_plugin(self) -> None:
        """vLLM only logs a plugin that fails to load; without ours nothing here is true."""
        try:
            await self._utility("coppice_ping")
        except Exception as error:
            raise StartFailed("the Coppice plugin is not active in the engine process") from error

    async def _warm_up(self) -> None:
        """The first generation compiles for seconds; nobody should have to wait for that."""
        token = self.facts.eos_token_ids[0] if self.facts.eos_token_ids else 0
        params = SamplingParams(
            max_tokens=4, top_p=0.9, top_k=20, ignore_eos=True, logprobs=0, detokenize=False
        )
        async for _ in self.llm.generate(tokens_input([token] * 4), params, "warm-up"):
            pass

    async def _watched(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            tasks.create_task(self._watch())
            if self._drafter is not None:
                tasks.create_task(self._drafter.run())

    async def _beat(self) -> None:
        try:
            await self._heart.run(self._ping, engine_processes())
        except EngineDead as error:
            self._heart.died(str(error))
        except Exception as error:  # without a heartbeat nothing can be said for the engine
            log.exception("the heartbeat failed")
            self._heart.died(f"the heartbeat failed: {error}")

    async def _ping(self) -> None:
        ping = await self._utility("coppice_ping")
        self._shared_prefix = over_ranks(ping["shared_prefix"])
        drafting = ping["drafter"]
        speculated = drafting["speculation"] if drafting else ping["speculation"][0]
        self._speculation = counts_of(speculated)
        if self._drafter is not None:
            self._drafter.pinged(drafting, ping["num_running"])
        self._graphs = graphs_over_ranks(ping["graphs"])

    async def _watch(self) -> None:
        """A hang that goes on is made a death, so that whoever waits for the engine is told."""
        await self._heart.watch(self._settings.hang_seconds)
        log.error("%s: the engine is killed", self._heart.pulse().reason)
        self._heart.died(f"it hung: {self._heart.pulse().reason}")
        self.kill()

    async def stop(self) -> None:
        self._heart.enter("stopping")
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        await self._end_start()
        await self._end_drafter()
        await self._keep_drafts()
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # or it would report the end as a death
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_SECONDS)
        await asyncio.to_thread(self._sweep)

    async def _end_drafter(self) -> None:
        if self._drafter is not None:
            await self._drafter.close()
        if self._drafters is not None:
            self._drafters.close()

    async def _keep_drafts(self) -> None:
        """Of an engine that hangs they are not worth waiting for."""
        if self._llm is not None and self._heart.stage == "stopping" and self._facts is not None:
            with suppress(EngineDead, TimeoutError):
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await speculation_start.end(self._llm, self._speculating)

    def _sweep(self) -> None:
        """vLLM kills its processes if they take long, and then nobody tidies up after them."""
        if self._scratch is not None:
            self._scratch.close()
        shared_memory.sweep()

    async def _end_start(self) -> None:
        """A start cannot be cancelled, only made to fail."""
        while self._starting is not None and not self._starting.done():
            kill_processes()
            await asyncio.wait({self._starting}, timeout=KILL_AGAIN_SECONDS)

    def kill(self) -> None:
        kill_processes()

    # Tokens and text

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        return self._chat.encode(conversation)

    def reply(self, token_ids: Sequence[int], conversation: Conversation) -> Reply:
        return self._chat.reply(token_ids, conversation)

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
                params = sampling_params(sample, self.facts.max_context_tokens)
                queue = await self.llm.add_request(
                    sample.id,
                    tokens_input(list(sample.prompt_token_ids), cache_salt=sample.cache_salt),
                    params,
                    lora_request=self._adapters.request(sample.adapter),
                    priority=sample.priority,
                )
                learner = self._drafter if self._drafter and self._drafter.learns else None
                ended = functools.partial(learner.heard, sample) if learner else None
                pending.append(Pending(queue, sample, ended))
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        except (VLLMClientError, ValueError, RequestRefused) as error:
            await self.abort([sample.id for sample in samples])
            raise RequestRefused(str(error)) from error
        return pending

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        under = self._adapters.request(adapter)
        flat = await scored(self.llm, [*prompt, *response], under)
        return first_logprobs(flat)[len(prompt) :]

    async def likeliest(
        self, prompt: Sequence[int], num_likeliest: int, adapter: str | None = None
    ) -> list[Place]:
        under = self._adapters.request(adapter)
        return places(await scored(self.llm, prompt, under, num_likeliest=num_likeliest))

    async def abort(self, sample_ids: Sequence[str]) -> None:
        with suppress(EngineDead, EngineDeadError):
            await self.llm.abort(list(sample_ids))

    async def settle_exports(self) -> None:
        """A call of all workers comes after every abort and every step that was sent before it."""
        if self.facts.kv_format is not None:
            await answered(self.llm, self.llm.collective_rpc("coppice_settle_exports"))

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
        await answered(self.llm, self.llm.pause_generation(mode=mode, clear_cache=recompute))

    async def resume(self) -> None:
        await answered(self.llm, self.llm.resume_generation())

    async def forget_prefixes(self) -> None:
        await self._utility("coppice_forget_prefixes")

    # Weights

    def check_weights(self, path: Path) -> None:
        assert self._first is not None, "the engine has not started"
        check(self._first, path, dtype=self.facts.dtype)

    async def swap_weights(self, path: Path, version: str) -> None:
        self._heart.enter("activating")
        previous = str(self._serving_path)
        load = self.llm.collective_rpc("coppice_load_weights", args=(str(path), previous))
        answers = await answered(self.llm, load)
        failed = [answer for answer in answers if not answer["ok"]]
        if not all(answer["restored"] for answer in failed):
            self._heart.died("the weights are half loaded")
            raise EngineDead("loading failed and the previous weights could not be put back")
        # After a restore as well: what was computed in between must not be found.
        await self.forget_prefixes()
        if failed:
            self._heart.enter("serving")
            raise LoadFailed("loading broke off; the previous weights serve on")
        await answered(self.llm, self.llm.update_weight_version(version))
        self._serving_path = path
        self._heart.enter("serving")

    # The drafter

    def drafter(self) -> DrafterStatus | None:
        return None if self._drafter is None else self._drafter.status()

    def drafter_file(self) -> Path:
        assert self._drafter is not None, "there is one"
        return self._drafter.file

    def check_drafter(self, path: Path) -> None:
        assert self._first_drafter is not None, "there is one"
        check(self._first_drafter, path, dtype=self.facts.dtype)

    async def offer_drafter(self, path: Path, version: str) -> None:
        assert self._drafter is not None, "there is one"
        await self._drafter.offer(path, version)

    # Adapters

    def check_adapter(self, path: Path) -> AdapterForm:
        assert self._first is not None, "the engine has not started"
        rank = self.facts.max_adapter_rank
        return check_adapter(self._first, path, max_rank=rank, dtype=self.facts.dtype)

    async def load_adapter(self, label: str, path: Path) -> None:
        await self._adapters.load(self.llm, label, path)

    async def unload_adapter(self, label: str) -> None:
        await self._adapters.unload(self.llm, label)

    async def _utility(self, method: str) -> Any:
        return await answered(self.llm, self.llm.engine_core.call_utility_async(method))
