"""Attributes of vLLM's objects that the engine reads, found in its source by names of variables.

Covered are `variable.attribute`, `other.variable.attribute` and `getattr(variable, "attribute")`
for the variables of `READS` in its files, `self.attribute` in functions that are added to
EngineCore, and `self.attribute` of the draft speculators as far as they do not define it. Not
covered are objects under other names, and those of the first model runner.

`python -m tests.engine.vllm_reads` writes the list that the code must have.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.launch.vllm_seams import ATTRIBUTES, Attribute, attributes_of, installed_package

ENGINE = Path(__file__).parents[2] / "engine"
GPU = "vllm.v1.worker.gpu"
LORA = "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin"
RUNNER = (f"{GPU}.model_runner:GPUModelRunner", LORA)
FIRST_RUNNER = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner",)
WORKER = ("vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.worker_base:WorkerBase")
GRAPHS = (
    f"{GPU}.cudagraph_utils:ModelCudaGraphManager",
    f"{GPU}.cudagraph_utils:CudaGraphManager",
)
GRAPH = (f"{GPU}.cudagraph_utils:BatchExecutionDescriptor",)
BATCH = (f"{GPU}.input_batch:InputBatch",)
SAMPLER = (f"{GPU}.sample.sampler:Sampler",)
BLOCK_TABLES = (f"{GPU}.block_table:BlockTables",)
STATES = (f"{GPU}.states:RequestState",)
SCHEDULER = ("vllm.v1.core.sched.scheduler:Scheduler",)
KV_MANAGER = ("vllm.v1.core.kv_cache_manager:KVCacheManager",)
CORE = ("vllm.v1.engine.core:EngineCore", "vllm.v1.engine.core:EngineCoreProc")
SPECULATOR = (
    f"{GPU}.spec_decode.standalone_ar.speculator:StandaloneARSpeculator",
    f"{GPU}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator",
    f"{GPU}.spec_decode.speculator:DraftModelSpeculator",
    f"{GPU}.spec_decode.speculator:BaseSpeculator",
)
DRAFT_SPECULATORS = ("DraftPasses", "DraftSpeculator")


@dataclass(frozen=True, slots=True)
class Reads:
    """A variable and the vLLM classes, from derived to base, that it refers to in some files."""

    variable: str
    classes: tuple[str, ...]
    files: tuple[str, ...]


READS = (
    Reads("runner", RUNNER, ("attention", "sampling/model_runner_v2_hooks.py")),
    Reads("runner", RUNNER, ("patches/reload_memory.py", "weights")),
    Reads("model_runner", (*RUNNER, *FIRST_RUNNER), ("launch/worker_extension.py", "weights")),
    Reads(
        "model_runner",
        (*RUNNER, *FIRST_RUNNER),
        ("adapters/worker_methods.py", "kv_transfer/worker/worker_methods.py"),
    ),
    Reads("model_runner", (*RUNNER, *FIRST_RUNNER), ("speculation/worker/worker_methods.py",)),
    Reads("worker", WORKER, ("weights",)),
    Reads("block_tables", BLOCK_TABLES, ("attention", "drafter/worker")),
    Reads("req_states", STATES, ("attention", "drafter/worker", "speculation")),
    Reads("manager", GRAPHS, ("attention", "cudagraphs/graph_candidates.py")),
    Reads("desc", GRAPH, ("cudagraphs/graph_candidates.py",)),
    Reads("batch", (f"{GPU}.model_runner:BatchReqState",), ("attention",)),
    Reads("batch", BATCH, ("drafter/worker",)),
    Reads("input_batch", BATCH, ("sampling/model_runner_v2_hooks.py",)),
    Reads("input_batch", BATCH, ("speculation/worker/gpu_speculator.py",)),
    Reads("sampler", SAMPLER, ("sampling/model_runner_v2_hooks.py",)),
    Reads("scheduler", SCHEDULER, ("drafter/core", "kv_lifetime/core", "speculation/core")),
    Reads("scheduler", SCHEDULER, ("kv_transfer/core", "launch")),
    Reads("kv_cache_manager", KV_MANAGER, ("kv_lifetime/core", "launch")),
    Reads("core", CORE, ("drafter/core", "kv_transfer/core", "kv_lifetime/core")),
    Reads("core", CORE, ("speculation/core",)),
)


def read_attributes() -> list[Attribute]:
    """The attributes with their owners, as vLLM's sources have them, and their readers."""
    readers: dict[tuple[tuple[str, ...], str], set[str]] = {}
    for file in sorted(ENGINE.rglob("*.py")):
        relative = str(file.relative_to(ENGINE))
        for classes, name in _reads_in(ast.parse(file.read_text()), relative):
            if not name.startswith(("coppice_", "_coppice", "__")):
                readers.setdefault((classes, name), set()).add(relative)
    places = {(owner, name) for classes, name in readers for owner in classes}
    candidates = [Attribute(owner=owner, name=name, used_by=()) for owner, name in sorted(places)]
    located = attributes_of(installed_package(), candidates)
    assigned = {(each.owner, each.name): each.assigned_in for each in located}
    files: dict[tuple[str, str], set[str]] = {}
    for (classes, name), of_classes in readers.items():
        owner = next((each for each in classes if assigned[each, name]), classes[0])
        files.setdefault((owner, name), set()).update(of_classes)
    return [
        replace(each, used_by=tuple(sorted(files[each.owner, each.name])))
        for each in located
        if (each.owner, each.name) in files
    ]


def _reads_in(tree: ast.Module, file: str) -> Iterator[tuple[tuple[str, ...], str]]:
    variables = {each.variable: each.classes for each in READS if file.startswith(each.files)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _variable(node.value) in variables:
            yield variables[_variable(node.value)], node.attr
        elif (found := _of_getattr(node)) and found[0] in variables:
            yield variables[found[0]], found[1]
        elif isinstance(node, ast.FunctionDef) and _is_added_to_core(node):
            yield from ((CORE, name) for name in _of_self(node))
        elif isinstance(node, ast.ClassDef) and node.name in DRAFT_SPECULATORS:
            inherited = _of_self(node) - _own_names()
            yield from ((SPECULATOR, name) for name in inherited)


def _of_getattr(node: ast.AST) -> tuple[str, str] | None:
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(str(name)), *_]):
            return _variable(value), name
    return None


def _variable(node: ast.expr) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def _is_added_to_core(node: ast.FunctionDef) -> bool:
    first = node.args.args[0].annotation if node.args.args else None
    return isinstance(first, ast.Constant) and first.value == "EngineCore"


def _of_self(node: ast.AST) -> set[str]:
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in attributes if ast.unparse(each.value) == "self"}


def _own_names() -> set[str]:
    """Names that the draft speculators define themselves."""
    names = set[str]()
    for file in (ENGINE / "drafter" / "worker").glob("*.py"):
        for cls in ast.walk(ast.parse(file.read_text())):
            if isinstance(cls, ast.ClassDef) and cls.name in DRAFT_SPECULATORS:
                names |= {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
                stored = (each for each in ast.walk(cls) if isinstance(each, ast.Attribute))
                names |= {each.attr for each in stored if isinstance(each.ctx, ast.Store)}
    return names


def main() -> None:
    lines = ",\n".join(json.dumps(asdict(each)) for each in read_attributes())
    ATTRIBUTES.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
