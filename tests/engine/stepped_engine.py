"""A real vLLM engine inside the test's process, stepped by hand."""

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.held_outputs.hooks import flushed
from engine.kv_lifetime import version_spans
from engine.kv_lifetime.keep_option import KEEP_KV_ARG, KeepOption
from engine.launch import engine_core_methods
from engine.launch.plugin import install_patches
from engine.requests import held_outputs
from engine.requests.logprob_arrays import LogprobChunks
from engine.requests.logprobs import sampled_logprobs
from engine.sampling import support_hooks
from engine.sampling.step_supports import rows_of
from engine.types.kv import ExportSlot, KvLoad, KvTransferParams
from engine.types.samples import KvVersionSpan, VersionSpan

EXTENSION = "engine.launch.worker_extension.WorkerExtension"
FAULTY = "tests.engine.faulty_worker.FaultyExtension"
WORKERS = (("vllm.v1.worker.cpu_worker", "CPUWorker"), ("vllm.v1.worker.gpu_worker", "Worker"))
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    num_cached_tokens: int
    support: list[bytes] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None
    experts: Any = None
    kv_versions: tuple[KvVersionSpan, ...] = ()


def install_hooks() -> None:
    """Install the hooks of all processes. They change only steps with a request for supports."""
    support_hooks.install_in_service()
    version_spans.install()
    held_outputs.install()
    support_hooks.install_in_engine_core()
    support_hooks.install_in_worker()


class LiveEngine:
    """Nothing runs between two calls. Close it before creating another one."""

    def __init__(
        self, model: Path, *, extension: str = EXTENSION, patched: bool = True, **settings: Any
    ) -> None:
        os.environ.update(ENVIRONMENT)
        import torch
        from vllm import LLM, envs

        envs.disable_envs_cache()  # an earlier engine may have cached its own variables

        torch.set_num_threads(1)  # as fast for such small models, and stable on a busy machine
        engine_core_methods.install()
        if patched:
            install_patches("EngineCore")
        install_hooks()
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 512,
            "block_size": 32,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**26,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": False,
        }
        self.serving = model
        self._extension = extension
        self._llm = LLM(str(model), worker_extension_cls=extension, **(defaults | settings))
        self._client = self._llm.llm_engine.engine_core
        self.core = self._client.engine_core
        self.core.set_weight_version(model.name)
        self._ids = (str(i) for i in itertools.count())
        self._answers: dict[str, Answer] = {}

    def submit(
        self,
        prompt: Sequence[int],
        *,
        export: ExportSlot | None = None,
        load: KvLoad | None = None,
        salt: str | None = None,
        adapter: Any = None,
        chain: str | None = None,
        max_lag: int | None = None,
        session_id: str | None = None,
        **sampling: Any,
    ) -> str:
        """Adds a request: by default greedy, without stop tokens.

        An adapter is one that `load_adapter_request` has loaded. The requests of a chain keep their
        KV across weights updates.
        """
        from engine.requests.request_params import RequestParams

        params = RequestParams(
            **{"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
            | sampling
        )
        if export is not None or load is not None:
            transfer = KvTransferParams(export=export, load=load)
            params.extra_args = {"kv_transfer_params": transfer.to_dict()}
        if chain is not None:
            params.extra_args = {KEEP_KV_ARG: KeepOption(max_lag=max_lag)}
        name = next(self._ids)
        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt is not None or chain is not None:
            tokens["cache_salt"] = salt or chain
        self._llm.llm_engine.add_request(
            name, tokens, params, lora_request=adapter, session_id=session_id
        )
        return name

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for output in self._llm.llm_engine.step():
                if output.finished:
                    self._answers[output.request_id] = _answer(output)

    def finish(self, *names: str) -> list[Answer]:
        """Steps until all of these have ended."""
        while not all(name in self._answers for name in names):
            self.step()
        return [self._answers.pop(name) for name in names]

    def ask(self, *prompts: Sequence[int], **sampling: Any) -> list[Answer]:
        return self.finish(*[self.submit(prompt, **sampling) for prompt in prompts])

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Any]:
        """vLLM's own outputs, including all logprobs of a sample; prompt i has seed i."""
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [SamplingParams(seed=seed, **sampling) for seed in range(len(prompts))]
        return list(self._llm.generate(inputs, params, use_tqdm=False))

    def flush(self) -> None:
        """Process the tokens that EngineCore holds, as it does before a pause or an abort."""
        processor = self._llm.llm_engine.output_processor
        for held in flushed(self.core).values():
            processor.process_outputs(held.outputs, weight_version=held.weight_version)

    def abort(self, name: str) -> None:
        self.flush()
        self._llm.llm_engine.abort_request([name])

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self._llm.collective_rpc(method, args=args))

    @contextmanager
    def paused(self, *, recompute: bool = False) -> Iterator[None]:
        self.flush()
        self.core.pause_scheduler("keep", clear_cache=recompute)
        yield
        self.core.resume_scheduler()

    def load(self, path: Path) -> list[Any]:
        return self.rpc("coppice_load_weights", str(path), str(self.serving))

    def swap(self, path: Path, *, recompute: bool = False, keep_kv: bool = False) -> Any:
        """Updates the weights as the service does; the version is the directory's name.

        Returns what EngineCore answers to the reset of the prefix cache.
        """
        with self.paused(recompute=recompute):
            answers = self.load(path)
            assert all(answer["ok"] for answer in answers), answers
            reset = self.core.coppice_reset_prefix_cache(keep_kv)
            self.core.set_weight_version(path.name)
        self.serving = path
        return reset

    def load_adapter_request(self, request: Any) -> Any:
        """Loads an adapter; returns the LoRA request that samples name."""
        named = (request.lora_name, request.lora_int_id, request.lora_path)
        assert self.rpc("coppice_load_adapter", *named) == [None]
        return request

    def close(self) -> None:
        """Shuts down.

        Also removes the extension from vLLM's worker classes, which keep it otherwise. Those that
        are not imported are left alone: vLLM's CPU worker replaces CUDA's streams when imported.
        """
        from vllm.utils.import_utils import resolve_obj_by_qualname

        self._client.shutdown()
        extension = resolve_obj_by_qualname(self._extension)
        for module, name in WORKERS:
            if module in sys.modules:
                worker = getattr(sys.modules[module], name)
                worker.__bases__ = tuple(b for b in worker.__bases__ if b is not extension)


class Preemptions:
    """Counter of the preempted requests of an engine."""

    def __init__(self, engine: LiveEngine) -> None:
        self.count = 0
        self._preempt = engine.core.scheduler._preempt_request
        engine.core.scheduler._preempt_request = self._on_preempted

    def _on_preempted(self, *args: Any, **named: Any) -> None:
        self.count += 1
        self._preempt(*args, **named)


@contextmanager
def live_engine(model: Path, **settings: Any) -> Iterator[LiveEngine]:
    engine = LiveEngine(model, **settings)
    try:
        yield engine
    finally:
        engine.close()


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    """Equal tokens and logprobs up to rounding, however they were batched."""
    for methods, theirs in zip(answers, expected, strict=True):
        assert methods.token_ids == theirs.token_ids
        assert methods.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def _logprobs(completion: Any) -> list[float]:
    """Logprobs of the sampled tokens, from arrays if other tests have installed them."""
    if completion.logprobs is None or isinstance(completion.logprobs, LogprobChunks):
        return sampled_logprobs(completion.logprobs)
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [entry[token].logprob for token, entry in pairs]


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    versions = [
        VersionSpan(version=span.version, start=span.start, end=span.end)
        for span in completion.weight_versions
    ]
    return Answer(
        token_ids=list(completion.token_ids),
        logprobs=_logprobs(completion),
        versions=versions,
        kv_versions=version_spans.kv_version_spans(
            version_spans.reports_of(output), versions, len(output.prompt_token_ids)
        ),
        num_cached_tokens=output.num_cached_tokens,
        support=rows_of(completion.sampling_mask or ()),
        finish=completion.finish_reason,
        stop_reason=completion.stop_reason,
        experts=completion.routed_experts,
    )
