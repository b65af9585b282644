"""Subclass of vLLM's OffloadingConnector: no offloading of KV from earlier weights.

vLLM finds an offloaded block by a hash of tokens alone. When weights change, vLLM's `reset_cache`
forgets all offloaded blocks, but lets running requests offload theirs again. Some of these were
computed under the old weights, and a later prompt would load them.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


class VersionedOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """Offloading connector that never offloads KV of earlier weights."""

    def reset_cache(self) -> bool | None:
        """Forget all offloaded blocks, and offload no block of a request that has begun."""
        answer: bool | None = super().reset_cache()
        for request in self.scheduler._req_status.values():
            request.max_offload_tokens = 0
        return answer
