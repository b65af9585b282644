"""Activation of weights that a trainer on the same host passes in GPU memory by CUDA IPC.

The engine opens the tensors while the publisher waits for the answer: later it may change them. So
such a version is staged and activated by one call.
"""

import asyncio

from coppice.wire.cuda_ipc_weights import TransferRequest
from coppice.wire.weights import ActivationAnswer
from engine.weights.ipc_tensors import WeightTransfer
from service.uncancellable_tasks import StateChanges
from service.weights.activation import Activation
from service.weights.stager import WeightStager
from service.weights_versions import Versions


class WeightTransfers:
    """Stages and activates weights versions in GPU memory."""

    def __init__(
        self,
        versions: Versions,
        stager: WeightStager,
        activation: Activation,
        state_changes: StateChanges,
    ) -> None:
        self._versions = versions
        self._stager = stager
        self._activation = activation
        self._state_changes = state_changes

    async def activate(
        self, label: str, request: TransferRequest, transfer: WeightTransfer
    ) -> ActivationAnswer:
        """Load the tensors, unless the caller is cancelled before the load begins."""
        try:
            return await self._state_changes.run(self._activate(label, request, transfer))
        except asyncio.CancelledError:
            transfer.is_withdrawn = True
            self._activation.idle_wait.wake_after(0.0)
            raise

    async def _activate(
        self, label: str, request: TransferRequest, transfer: WeightTransfer
    ) -> ActivationAnswer:
        await self._stager.stage_transfer(label, transfer, sequence=request.sequence)
        try:
            return await self._activation.apply(
                label, request.mode, allow_rollback=request.allow_rollback, kv=request.kv
            )
        finally:
            self._versions.end_transfer(label)
