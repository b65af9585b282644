"""Feature class of weights transfer from a trainer's GPU memory (CUDA IPC)."""

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from engine.errors import StartFailed
from engine.feature_base import EngineFeature, refuse_several_machines


class WeightTransfer(EngineFeature):
    """Hand-over of weights in GPU memory by CUDA IPC."""

    name = "weight_transfer"
    covers = {"weight_transfer_config": "engine.weight_transfer"}

    def check(self) -> None:
        if self.settings.engine.weight_transfer is not None:
            refuse_several_machines(
                self.settings.engine,
                "weights in GPU memory are handed over on one machine",
                "engine.weight_transfer to none",
            )

    def set_arguments(self, arguments: AsyncEngineArgs, *, on_cpu: bool) -> None:
        if (backend := self.settings.engine.weight_transfer) is not None:
            arguments.weight_transfer_config = WeightTransferConfig(backend=backend)

    async def prepare(self) -> None:
        """Raise StartFailed if a worker cannot receive weights in GPU memory."""
        backend = self.settings.engine.weight_transfer
        if backend is None:
            return
        obstacles = await self.engine.call_workers("coppice_transfer_obstacle")
        if found := [obstacle for obstacle in obstacles if obstacle is not None]:
            raise StartFailed(f"engine.weight_transfer is {backend}: {found[0]}; set it to none")
