"""A GPU engine of the product from its start to its shutdown, in a process without a GPU.

vLLM's EngineCore, executor, worker and Model Runner V2 call each other in their own order: load,
profile, a small KV cache for the memory of graphs, its teardown, the real KV cache, warm-up with
real outputs, capture, and steps. `run` is the target of a process that is called EngineCore, as the
plugin expects.
"""

import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.engine import gpu_on_cpu

MODEL = Path(__file__).parents[2] / "examples" / "seedling" / "model"
BLOCK = 16
PROMPT = list(b"The answer to 17 + 25 is 42. The answer to 30 + 12 is 42. The answer to 9 + 8 is")
OTHER = list(b"Count: one, two, three, four, five, six, seven, ")
TOKENS = 12
GROUP = 4


@dataclass(kw_only=True)
class Report:
    """Record of a life, as sent to the test.

    `calls` are vLLM's life-cycle methods in the order in which vLLM called them. `counted` has the
    counters of the heartbeat after each phase. `texts` has prompts and greedy responses, and
    `logprobs` those of the responses.
    """

    calls: list[str] = field(default_factory=list)
    counted: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, list[tuple[list[int], list[int]]]] = field(default_factory=dict)
    logprobs: dict[str, list[list[float]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failed_features: dict[str, str | None] = field(default_factory=dict)
    error: str = ""


def live(speculation: str) -> Report:
    """Run an engine with this `speculation.mode` through its life, in a new process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(speculation, sender), name="EngineCore")
    process.start()
    sender.close()
    try:
        report: Report = receiver.recv()
    except EOFError:
        process.join()
        return Report(error=f"the process ended with exit code {process.exitcode}")
    process.join()
    return report


def run(speculation: str, sender: Connection) -> None:
    report = Report()
    try:
        gpu_on_cpu.install()
        with tempfile.TemporaryDirectory() as folder:
            _live(speculation, Path(folder), report)
    except BaseException:
        report.error = traceback.format_exc()
    sender.send(report)


def _live(mode: str, folder: Path, report: Report) -> None:
    from tests.engine.stepped_engine import LiveEngine

    with _started(mode, folder) as arguments:
        _record_calls(report)
        _shorten_calibration()
        engine = LiveEngine(MODEL, patched=False, **arguments)
        worker = engine.core.model_executor.driver_worker.worker
        try:
            _serve(engine, worker, mode, report)
        finally:
            engine.close()
        report.facts["closed"] = _after_shutdown(worker)


@contextmanager
def _started(mode: str, folder: Path) -> Iterator[dict[str, Any]]:
    """vLLM's arguments for an engine with every feature, after the plugin's hooks."""
    from vllm.engine.arg_utils import EngineArgs

    from engine.attention.settings import AttentionSettings
    from engine.cudagraphs.settings import GraphsSettings
    from engine.launch import plugin
    from engine.launch.environment import engine_environment
    from engine.settings import EngineSettings
    from engine.speculation.settings import SpeculationSettings
    from tests.engine.made_arguments import arguments_and_environment

    settings = EngineSettings(
        model=str(MODEL),
        dtype="float16",
        seed=0,
        block_size=BLOCK,
        max_context_tokens=192,
        max_sequences=8,
        max_batched_tokens=64,
        gpu_memory_utilization=0.1,
        enable_sleep_mode=True,
        prompt_kv=True,
        cache_directory=folder,
        vllm_args={"compilation_config": {"mode": 0, "custom_ops": ["none"]}},
    )
    made, variables = arguments_and_environment(
        settings,
        MODEL,
        attention=AttentionSettings(shared_prefix="auto" if mode == "off" else "always"),
        speculation=SpeculationSettings(mode=mode, longest_draft=3, drafter=MODEL),
        graphs=GraphsSettings(budget_bytes=2**30),
    )
    given = {each.name: getattr(made, each.name) for each in fields(EngineArgs)}
    extension = given.pop("worker_extension_cls")
    del given["model"]
    with engine_environment(
        settings,
        of_features=variables,
        on_cpu=False,
        temp_dir=folder,
    ):
        plugin.install()
        yield given | {
            "worker_cls": gpu_on_cpu.WORKER,
            "extension": extension,
            "skip_tokenizer_init": True,
        }


def _shorten_calibration() -> None:
    from engine.attention import cuda_calibration, cuda_timing

    calibration: Any = cuda_calibration
    calibration.SHAPES = calibration.SHAPES[:1]
    cuda_timing.CALLS = cuda_timing.REPEATS = 1


def _record_calls(report: Report) -> None:
    """Record vLLM's life-cycle methods as they are called."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    def recorded(cls: Any, name: str) -> None:
        method = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            report.calls.append(name)
            return method(self, *args, **kwargs)

        setattr(cls, name, call)

    for name in ("load_model", "profile_run", "initialize_kv_cache", "capture_model", "shutdown"):
        recorded(GPUModelRunner, name)
    for name in ("compile_or_warm_up_model", "sample_tokens", "sleep", "wake_up"):
        recorded(Worker, name)


def _serve(engine: Any, worker: Any, mode: str, report: Report) -> None:
    _start_drafting(engine, mode)
    report.facts["state"] = worker.coppice_attention_state()
    report.facts["stale"] = _stale(worker.model_runner)
    report.facts["is_calibrated"] = _share_always(worker.model_runner)
    worker.coppice_reset_graph_counters()
    report.counted["start"] = engine.core.coppice_ping()
    _ask(engine, "served", report)
    for _ in range(2):
        worker.execute_dummy_batch()
    report.counted["dummy"] = engine.core.coppice_ping()
    engine.swap(MODEL)
    _ask(engine, "reloaded", report)
    report.facts["sleep"] = _sleep(engine, worker)
    _ask(engine, "woken", report)
    from vllm.v1.worker.gpu.sample import logprob

    from engine.runtime.feature_guard import features

    report.facts["computes_logprobs"] = logprob.compute_token_logprobs.__module__
    report.failed_features = {
        name: state.reason for name, state in features().items() if not state.on
    }


def _start_drafting(engine: Any, mode: str) -> None:
    """Start drafting as the service does, with every draft sent."""
    from engine.drafter.core.engine_core_methods import _drafting
    from tests.engine.speculation.drafting_engine import SendAllDrafts, SendUniformDrafts

    if mode == "siblings":
        assert engine.core.coppice_start_sibling_drafts()
        engine.core.coppice_finish_sibling_profile()
        engine.core.coppice_sibling_drafts.controller = SendUniformDrafts()
    elif mode == "drafter":
        assert engine.core.coppice_start_drafting("d0")
        engine.core.coppice_finish_drafter_profile()
        _drafting(engine.core).length.controller = SendAllDrafts()


def _share_always(runner: Any) -> bool:
    """Share prefixes whatever the measured costs; returns whether there are any."""
    from engine.attention.target_builders import target_builders

    groupers = [builder.grouper for _, builder in target_builders(runner)]
    for grouper in groupers:
        grouper.mode = "always"
    return all(grouper.crossover is not None for grouper in groupers)


def _stale(runner: Any) -> dict[str, Any]:
    """Objects of ours by name: True for one of the KV cache of profiling, not of the real one."""
    from engine.attention.cuda_steps import host_block_tables

    mirror = host_block_tables(runner.block_tables)
    found = {
        "mirror": mirror is None or mirror._num_blocks is not runner.block_tables.num_blocks.np,
    }
    ledger = getattr(runner.speculator, "ledger", None)
    if ledger is not None:
        found["ledger"] = len(ledger._is_complete) != runner.kv_cache_config.num_blocks
    return found


def _ask(engine: Any, phase: str, report: Report) -> None:
    """Greedy responses of a group with one prompt, beside another sample; then of one alone."""
    from tests.engine.speculation.drafting_engine import in_group

    prompts = [PROMPT] * GROUP + [OTHER]
    options = {"max_tokens": TOKENS, **in_group(phase)}
    first = engine.ask(PROMPT, **options)
    answers = [*first, *engine.ask(*prompts, **options)]
    report.texts[phase] = [
        (prompt, answer.token_ids)
        for prompt, answer in zip([PROMPT, *prompts], answers, strict=True)
    ]
    report.logprobs[phase] = [answer.logprobs for answer in answers]
    report.counted[phase] = engine.core.coppice_ping()


def _sleep(engine: Any, worker: Any) -> dict[str, Any]:
    """Sleep and wake as on a GPU; the CPU's way is chosen by the type of the worker's device."""
    device, worker.device = worker.device, SimpleNamespace(type="cuda")
    try:
        with engine.paused(recompute=True):
            slept = worker.coppice_sleep(1, ["weights", "kv_cache"])
            missing = worker.coppice_missing_bytes(["weights", "kv_cache"])
            woken = worker.coppice_wake(["weights", "kv_cache"])
    finally:
        worker.device = device
    return {"slept": slept, "missing_bytes": missing, "woken": woken}


def _after_shutdown(worker: Any) -> dict[str, Any]:
    """The calls that a heartbeat or a late request may still make."""
    return {
        "state": worker.coppice_attention_state(),
        "counters": worker.coppice_counters(),
        "flushed": worker.coppice_flush_exports(),
    }
