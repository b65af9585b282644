"""Methods added to vLLM's workers for prompt KV: prepare and flush exports."""

from typing import Any

from engine.kv_transfer.worker import export_setup
from engine.kv_transfer.worker.export_setup import KvExportInfo
from engine.runtime.feature_guard import Failure, attempt


def coppice_prepare_kv_export(self: Any, gpu_bytes: int = 0) -> KvExportInfo | str:
    """Prepare prompt KV exports. Returns their format, or why this rank cannot export.

    The rank takes `gpu_bytes` of GPU memory for KV that stays there.
    """
    model = self.model_runner.model
    answer = attempt(export_setup.prepare, self.vllm_config, model, gpu_bytes=gpu_bytes)
    return answer.message if isinstance(answer, Failure) else answer


def coppice_flush_exports(self: Any) -> bool:
    return not isinstance(attempt(export_setup.flush), Failure)


METHODS = (coppice_prepare_kv_export, coppice_flush_exports)
