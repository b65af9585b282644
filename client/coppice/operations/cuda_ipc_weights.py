"""Client operation that activates weights directly from a trainer's GPU memory on the same host."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from coppice.errors import ProblemError, TransportError
from coppice.operations.weights import address_of
from coppice.transport.messages import json_request
from coppice.transport.retry import RequestSender
from coppice.weights.gpu_weights import GpuWeights
from coppice.weights.tensor_serialization import StateDict
from coppice.wire.columns.kv_version_spans import ActivationKv
from coppice.wire.cuda_ipc_weights import TransferRequest
from coppice.wire.weights import ActivationAnswer, ActivationMode


class WeightTransferOperations:
    """Operation of a trainer that uses the GPUs of a server with engine.weight_transfer."""

    _sender: RequestSender

    async def transfer_weights(
        self,
        version: str,
        source: StateDict | GpuWeights,
        *,
        sequence: int | None = None,
        mode: ActivationMode = "keep",
        kv: ActivationKv = "reset",
        allow_rollback: bool = False,
        timeout: float | None = None,
    ) -> ActivationAnswer:
        """Activates weights that are in GPU memory of this host; no file is written.

        The server opens the tensors by CUDA IPC, so they must not change before the call returns.
        After TimedOut or a lost connection a load that has begun goes on: leave the tensors as
        they are until `weights` lists the version as active, or does not list it. The version
        cannot be activated again later. The call is not retried after a lost connection: a version
        that exists raises VersionConflict.
        """
        with ExitStack() as exported:
            if not isinstance(source, GpuWeights):
                source = exported.enter_context(GpuWeights(source))
            request = TransferRequest(
                tensors=source.tensors,
                sequence=sequence,
                mode=mode,
                kv=kv,
                allow_rollback=allow_rollback,
            )
            path = address_of(version) + "/transfer"
            call = json_request("POST", path, request, read_timeout=timeout)
            with _recording_refusal(source):
                return (await self._sender.send(call)).read(ActivationAnswer)


@contextmanager
def _recording_refusal(weights: GpuWeights) -> Iterator[None]:
    """Context manager of a transfer that records its outcome in the weights.

    A server that has answered with an error has opened no tensor, or closed all.
    """
    try:
        yield
    except ProblemError:
        weights.mark_refused()
        raise
    except BaseException as error:
        is_unsent = isinstance(error, TransportError) and error.unsent
        weights.mark_refused() if is_unsent else weights.mark_lost()
        raise
