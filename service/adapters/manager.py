"""Registry of LoRA adapters: names, current versions, use counts, and unloading.

A name has one current version, which new rollouts use; a rollout keeps the version that it started
with. A replaced or unloaded version stays in the engine until its last rollout has ended, and is
evicted when the next adapter is loaded or unloaded. Runs on one event loop; changes are serialized.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coppice.wire.weights import AdapterAnswer, AdaptersAnswer
from engine.errors import CheckpointRefused, LoadFailed
from engine.protocol.weights import Weights
from engine.types.samples import AdapterInfo
from service.adapters.adapter_files import AdapterFiles, ReceivedAdapter
from service.errors import (
    ActivationFailed,
    AdapterNotFound,
    AdaptersFull,
    InvalidRequest,
    Unsupported,
    VersionConflict,
    WeightsRefused,
)
from service.observability.metrics import WeightMetrics

RETRY_SECONDS = 2.0
NOT_LOADED = "not loaded on this replica; adapters are not replicated, so load it on each"


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedAdapter:
    """One version of a LoRA adapter that is loaded in the engine.

    `folder` is the server's private copy of its files. `num_users` counts the running rollouts and
    scoring requests that use it.
    """

    name: str
    version: str
    info: AdapterInfo
    digest: str
    folder: Path
    num_users: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"

    def answer(self, *, current: bool) -> AdapterAnswer:
        return AdapterAnswer(
            name=self.name,
            version=self.version,
            current=current,
            rank=self.info.rank,
            num_bytes=self.info.num_bytes,
            num_rollouts_running=self.num_users,
        )


class AdapterManager:
    """Loads and unloads LoRA adapters in the engine, and counts the requests that use each."""

    def __init__(self, engine: Weights, files: AdapterFiles, metrics: WeightMetrics) -> None:
        self._engine = engine
        self._files = files
        self._loads = metrics.adapter_loads
        self._loaded_by_label: dict[str, LoadedAdapter] = {}
        self._digests: dict[str, str] = {}
        """Content digests by label. Kept after unloading, so that no label gets other content."""
        self._current_by_name: dict[str, LoadedAdapter] = {}
        self._change_lock = asyncio.Lock()
        self._last_version_number = 0

    @property
    def num_loaded(self) -> int:
        return len(self._loaded_by_label)

    def current(self) -> list[LoadedAdapter]:
        return list(self._current_by_name.values())

    def answer(self) -> AdaptersAnswer:
        """Response body that lists adapters: current versions, and replaced ones still in use."""
        info = self._engine.info
        listed = [
            adapter
            for adapter in self._loaded_by_label.values()
            if self._is_current(adapter) or adapter.num_users
        ]
        return AdaptersAnswer(
            adapters=[self.answer_of(adapter) for adapter in listed],
            max_adapters=info.max_adapters,
            max_rank=info.max_adapter_rank,
        )

    def answer_of(self, adapter: LoadedAdapter) -> AdapterAnswer:
        return adapter.answer(current=self._is_current(adapter))

    # Use

    def resolve(self, reference: str | None) -> str | None:
        """Look up the label (`name@version`) of an adapter's current version; None for no adapter.

        There must be no await between this call and `begin`.
        """
        if reference is None:
            return None
        name, separator, version = reference.partition("@")
        adapter = self._current_by_name.get(name)
        if adapter is None:
            raise AdapterNotFound(NOT_LOADED)
        if separator and version != adapter.version:
            raise AdapterNotFound(f"{name!r} is at version {adapter.version!r}")
        return adapter.label

    def begin(self, label: str | None) -> None:
        if label is not None:
            self._loaded_by_label[label].num_users += 1

    def end(self, label: str | None) -> None:
        if label is not None:
            self._loaded_by_label[label].num_users -= 1

    @contextmanager
    def using(self, reference: str | None) -> Iterator[str | None]:
        label = self.resolve(reference)
        self.begin(label)
        try:
            yield label
        finally:
            self.end(label)

    # Change

    async def load(
        self, name: str, version: str | None, path: str, *, replace: bool = True
    ) -> tuple[LoadedAdapter, bool]:
        """Load an adapter from a directory and make it the current version of its name.

        Returns the adapter and whether it is new. Loading the same files again has no effect. With
        `replace` false, different files under an existing name are refused.
        """
        self._check_supported(name)
        async with self._change_lock:
            return await self._add(name, version, await self._files.from_directory(path), replace)

    async def receive(
        self, name: str, chunks: AsyncIterator[bytes], digest: str | None
    ) -> ReceivedAdapter:
        """Receive the uploaded files of an adapter, which `add` loads afterwards.

        Cancellable if the client disconnects, unlike `add`.
        """
        self._check_supported(name)
        return await self._files.from_upload(chunks, digest)

    async def add(
        self, name: str, version: str, received: ReceivedAdapter
    ) -> tuple[LoadedAdapter, bool]:
        async with self._change_lock:
            return await self._add(name, version, received, replace=True)

    async def unload(self, name: str) -> None:
        """Unload an adapter. New rollouts cannot use it; running rollouts continue with it."""
        async with self._change_lock:
            if self._current_by_name.pop(name, None) is None:
                raise AdapterNotFound(NOT_LOADED)
            await self._unload_unused()

    def check(self) -> None:
        """Assert that current adapters are loaded and that no use count is negative."""
        assert all(
            self._loaded_by_label[adapter.label] is adapter
            for adapter in self._current_by_name.values()
        )
        assert all(adapter.num_users >= 0 for adapter in self._loaded_by_label.values())

    def _check_supported(self, name: str) -> None:
        if not self._engine.info.max_adapters:
            raise Unsupported("LoRA adapters are disabled: set engine.max_adapters")
        if name in (self._engine.info.model, self._engine.info.model_given):
            raise InvalidRequest.of_parameter("name", "it is the name of the served model")

    async def _add(
        self, name: str, version: str | None, received: ReceivedAdapter, replace: bool
    ) -> tuple[LoadedAdapter, bool]:
        try:
            existing = self._existing(name, version, received.digest, replace)
            adapter = existing or await self._load_new(
                name, version or self._next_unused_version(name), received
            )
        except BaseException:
            self._files.discard(received.folder)
            raise
        if existing is not None:
            self._files.discard(received.folder)
        return adapter, existing is None

    def _existing(
        self, name: str, version: str | None, digest: str, replace: bool
    ) -> LoadedAdapter | None:
        """Current adapter of this name if it has the same files, otherwise None.

        Raises VersionConflict if the name or version must not be reassigned.
        """
        current = self._current_by_name.get(name)
        same = current is not None and current.digest == digest
        if current is not None and same and version in (None, current.version):
            return current
        if version is not None and f"{name}@{version}" in self._digests:
            self._check_version_reusable(f"{name}@{version}", digest)
        if current is not None and not replace:
            raise VersionConflict("the adapter is already loaded: unload it or use another name")
        return None

    def _check_version_reusable(self, label: str, digest: str) -> None:
        """Refuse to reuse a label that had other content, or is current or still in use."""
        if self._digests[label] != digest:
            raise VersionConflict("the adapter had this version with different content")
        adapter = self._loaded_by_label.get(label)
        if adapter is not None and (self._is_current(adapter) or adapter.num_users):
            raise VersionConflict("the adapter has this version, which is current or still in use")

    async def _load_new(self, name: str, version: str, received: ReceivedAdapter) -> LoadedAdapter:
        try:
            info = await asyncio.to_thread(self._engine.check_adapter, received.folder)
        except CheckpointRefused as refused:
            self._loads.labels("refused").inc()
            raise WeightsRefused(str(refused)) from refused
        adapter = LoadedAdapter(
            name=name, version=version, info=info, digest=received.digest, folder=received.folder
        )
        await self._ensure_capacity()
        try:
            await self._engine.load_adapter(adapter.label, adapter.folder)
        except LoadFailed as error:
            self._loads.labels("failed").inc()
            raise ActivationFailed(str(error)) from error
        self._loads.labels("loaded").inc()
        self._loaded_by_label[adapter.label] = self._current_by_name[name] = adapter
        self._digests[adapter.label] = adapter.digest
        return adapter

    async def _ensure_capacity(self) -> None:
        await self._unload_unused()
        if len(self._loaded_by_label) >= self._engine.info.max_adapters:
            raise AdaptersFull(
                f"{len(self._loaded_by_label)} adapters are loaded; unload one, or wait until the "
                "samples of a replaced one have ended",
                retry_after_seconds=RETRY_SECONDS,
            )

    async def _unload_unused(self) -> None:
        for adapter in list(self._loaded_by_label.values()):
            if not (self._is_current(adapter) or adapter.num_users):
                await self._engine.unload_adapter(adapter.label)
                del self._loaded_by_label[adapter.label]
                self._files.discard(adapter.folder)

    def _is_current(self, adapter: LoadedAdapter) -> bool:
        return self._current_by_name.get(adapter.name) is adapter

    def _next_unused_version(self, name: str) -> str:
        """Generate a version string that no adapter of this name has ever had."""
        while True:
            self._last_version_number += 1
            version = f"update-{self._last_version_number}"
            if f"{name}@{version}" not in self._digests:
                return version
