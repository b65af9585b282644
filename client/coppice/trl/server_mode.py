"""TRL's server mode, `GRPOConfig(use_vllm=True, vllm_mode="server")`, without NCCL.

TRL's client requests samples as before, and TRL gathers and renames the weights. Only the transfer
of weights is replaced.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from coppice.client import Rollouts
from coppice.trl.labels import VersionLabels


def install() -> None:
    """Replaces TRL's client. Call it before creating a trainer; repeated calls do nothing."""
    from trl.generation import vllm_client, vllm_generation

    if getattr(vllm_generation.VLLMClient, "over_http", False):
        return
    vllm_client.VLLMClient = vllm_generation.VLLMClient = _over_http(vllm_client.VLLMClient)


def _over_http(base: Any) -> Any:
    class HttpClient(base):  # type: ignore[misc]
        """VLLMClient that sends the weights of a version as one safetensors file."""

        over_http = True

        def init_communicator(self, device: Any = 0) -> None:
            """Creates the HTTP client; there is no process group to join."""
            self._rollouts = Rollouts(self.base_url)
            self._labels = VersionLabels()

        def update_named_params(
            self, metadata: Iterable[Any], named_params: Iterator[tuple[str, Any]]
        ) -> None:
            """Copies the parameters, since gathered ones are freed after their iteration."""
            if not self._updating_weights:
                self._start_weight_update()
            for name, tensor in named_params:
                self._pending[name] = tensor.detach().to("cpu", copy=True)
            if not self._updating_weights:
                self._finish_weight_update()

        def _start_weight_update(self) -> None:
            self._pending: dict[str, Any] = {}

        def _finish_weight_update(self) -> None:
            pending, self._pending = self._pending, {}
            self._rollouts.publish_weights(self._labels.next(), pending)

        def close_communicator(self) -> None:
            self._rollouts.close()

    HttpClient.__name__ = base.__name__
    return HttpClient
