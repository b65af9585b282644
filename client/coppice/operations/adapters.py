"""Client operations on LoRA adapters: load from a path, upload, list, unload."""

import json
import tempfile
from os import PathLike, fspath
from pathlib import Path

from pydantic import TypeAdapter

from coppice.transport.messages import HttpRequest, file_request, json_request
from coppice.transport.retry import RequestSender
from coppice.weights.tensor_serialization import tensors_from_files, write_safetensors
from coppice.wire.base import Label
from coppice.wire.weights import AdapterAnswer, AdaptersAnswer, LoadAdapterRequest

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

_LABEL: TypeAdapter[str] = TypeAdapter(Label)


class AdapterOperations:
    """LoRA adapter operations. All require an API key with the role admin."""

    _sender: RequestSender

    async def load_adapter(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        version: str | None = None,
        timeout: float | None = None,
    ) -> AdapterAnswer:
        """Loads a LoRA adapter from a directory in PEFT format that the server can read.

        Loading the same files again changes nothing, so the call is retried after a lost
        connection.
        """
        request = LoadAdapterRequest(path=fspath(path), version=version)
        call = json_request(
            "POST", _address(name), request, read_timeout=timeout, is_idempotent=True
        )
        return (await self._sender.send(call)).read(AdapterAnswer)

    async def publish_adapter(
        self,
        name: str,
        version: str,
        source: str | PathLike[str],
        *,
        timeout: float | None = None,
    ) -> AdapterAnswer:
        """Uploads a LoRA adapter directory in PEFT format and makes it the current version."""
        config = json.loads((Path(source) / CONFIG_FILE).read_text())
        with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
            path = Path(folder) / TENSORS_FILE
            tensors = tensors_from_files([Path(source) / TENSORS_FILE])
            metadata = {"format": "pt", "adapter_config": json.dumps(config)}
            digest = await self._sender.driver.run_steps(write_safetensors(path, tensors, metadata))
            address = f"{_address(name)}/{_LABEL.validate_python(version)}"
            call = file_request(address, path, digest, read_timeout=timeout)
            return (await self._sender.send(call)).read(AdapterAnswer)

    async def adapters(self) -> AdaptersAnswer:
        """Lists the LoRA adapters that the server has loaded."""
        return await self._sender.get("/v1/adapters", AdaptersAnswer)

    async def unload_adapter(self, name: str) -> None:
        """Unloads a LoRA adapter; running rollouts that use it continue.

        The call is not retried after a lost connection.
        """
        reply = await self._sender.send(HttpRequest(method="DELETE", path=_address(name)))
        reply.check()


def _address(name: str) -> str:
    return f"/v1/adapters/{_LABEL.validate_python(name)}"
