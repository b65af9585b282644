"""Which adapters there are, under which names, and when the engine may forget them.

A name has one current version, which new rollouts get; a rollout keeps the one that it began with.
What was replaced or unloaded stays in the engine until its last rollout has ended, and its place is
taken back when the next adapter needs one. Lives on one event loop; one change at a time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from coppice.wire.adapters import AdapterAnswer, AdaptersAnswer
from engine.errors import CheckpointRefused, LoadFailed
from engine.protocol import Engine
from service.adapters.loaded_adapter import Held
from service.adapters.upload import Incoming, Intake
from service.http.errors import (
    ActivationFailed,
    AdapterNotFound,
    AdaptersFull,
    InvalidRequest,
    Unsupported,
    VersionConflict,
    WeightsRefused,
)

RETRY_SECONDS = 2.0
NOT_HERE = "it is not loaded on this replica: adapters are not passed on, load it on each"
LoadOutcome = Literal["loaded", "refused", "failed"]
Counted = Callable[[LoadOutcome], None]


class Adapters:
    """Owner of every adapter that the engine holds."""

    def __init__(self, engine: Engine, intake: Intake, *, counted: Counted) -> None:
        self._engine = engine
        self._intake = intake
        self._counted = counted
        self._held: dict[str, Held] = {}
        self._digests: dict[str, str] = {}
        """By label, also of what is forgotten: a version is never another adapter."""
        self._current: dict[str, Held] = {}
        self._changing = asyncio.Lock()
        self._last_number = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def current(self) -> list[Held]:
        return list(self._current.values())

    def answer(self) -> AdaptersAnswer:
        """What nobody runs under any more is as good as gone."""
        facts = self._engine.facts
        listed = [held for held in self._held.values() if self._is_current(held) or held.num_users]
        return AdaptersAnswer(
            adapters=[self.answer_of(held) for held in listed],
            max_adapters=facts.max_adapters,
            max_rank=facts.max_adapter_rank,
        )

    def answer_of(self, held: Held) -> AdapterAnswer:
        return held.answer(current=self._is_current(held))

    # Use

    def resolve(self, named: str | None) -> str | None:
        """The label of a current version; from here to `begin` there must be no await."""
        if named is None:
            return None
        name, at, version = named.partition("@")
        held = self._current.get(name)
        if held is None:
            raise AdapterNotFound(NOT_HERE)
        if at and version != held.version:
            raise AdapterNotFound(f"{name!r} is at version {held.version!r}")
        return held.label

    def begin(self, label: str | None) -> None:
        if label is not None:
            self._held[label].num_users += 1

    def end(self, label: str | None) -> None:
        if label is not None:
            self._held[label].num_users -= 1

    @contextmanager
    def using(self, named: str | None) -> Iterator[str | None]:
        label = self.resolve(named)
        self.begin(label)
        try:
            yield label
        finally:
            self.end(label)

    # Change

    async def load(
        self, name: str, version: str | None, path: str, *, replace: bool = True
    ) -> tuple[Held, bool]:
        """The current version from now on, and whether it is new. The same files again change
        nothing; unless they may `replace` what has the name, others are refused."""
        self._check_served(name)
        async with self._changing:
            return await self._add(name, version, await self._intake.copied(path), replace)

    async def receive(
        self, name: str, chunks: AsyncIterator[bytes], digest: str | None
    ) -> Incoming:
        """For `add`. A caller may leave in the middle of this, but not of that."""
        self._check_served(name)
        return await self._intake.uploaded(chunks, digest)

    async def add(self, name: str, version: str, incoming: Incoming) -> tuple[Held, bool]:
        async with self._changing:
            return await self._add(name, version, incoming, replace=True)

    async def unload(self, name: str) -> None:
        """New rollouts do not find it any more; those under it go on."""
        async with self._changing:
            if self._current.pop(name, None) is None:
                raise AdapterNotFound(NOT_HERE)
            await self._forget_unused()

    def check(self) -> None:
        """The books balance."""
        assert all(self._held[held.label] is held for held in self._current.values())
        assert all(held.num_users >= 0 for held in self._held.values())

    def _check_served(self, name: str) -> None:
        if not self._engine.facts.max_adapters:
            raise Unsupported("adapters are not served here: start with engine.max_adapters")
        if name in (self._engine.facts.model, self._engine.facts.model_given):
            raise InvalidRequest.of_parameter("name", "it is the served model's own")

    async def _add(
        self, name: str, version: str | None, incoming: Incoming, replace: bool
    ) -> tuple[Held, bool]:
        try:
            known = self._known(name, version, incoming.digest, replace)
            held = known or await self._loaded(name, version or self._free_version(name), incoming)
        except BaseException:
            self._intake.discard(incoming.home)
            raise
        if known is not None:
            self._intake.discard(incoming.home)
        return held, known is None

    def _known(self, name: str, version: str | None, digest: str, replace: bool) -> Held | None:
        """What the name has, if it is this very adapter; VersionConflict if it may not change."""
        current = self._current.get(name)
        same = current is not None and current.digest == digest
        if current is not None and same and version in (None, current.version):
            return current
        if version is not None and f"{name}@{version}" in self._digests:
            self._refuse_again(f"{name}@{version}", digest)
        if current is not None and not replace:
            raise VersionConflict("the adapter is loaded: unload it, or load it under a new name")
        return None

    def _refuse_again(self, label: str, digest: str) -> None:
        """Of other bytes, or of these while they are the current version's or still run."""
        if self._digests[label] != digest:
            raise VersionConflict("the adapter had that version, with other bytes")
        held = self._held.get(label)
        if held is not None and (self._is_current(held) or held.num_users):
            raise VersionConflict("the adapter has that version, and something runs under it")

    async def _loaded(self, name: str, version: str, incoming: Incoming) -> Held:
        try:
            form = await asyncio.to_thread(self._engine.check_adapter, incoming.home)
        except CheckpointRefused as refused:
            self._counted("refused")
            raise WeightsRefused(str(refused)) from refused
        held = Held(
            name=name, version=version, form=form, digest=incoming.digest, home=incoming.home
        )
        await self._make_room()
        try:
            await self._engine.load_adapter(held.label, held.home)
        except LoadFailed as error:
            self._counted("failed")
            raise ActivationFailed(str(error)) from error
        self._counted("loaded")
        self._held[held.label] = self._current[name] = held
        self._digests[held.label] = held.digest
        return held

    async def _make_room(self) -> None:
        await self._forget_unused()
        if len(self._held) >= self._engine.facts.max_adapters:
            raise AdaptersFull(
                f"{len(self._held)} are loaded; unload one, or wait for what runs under a "
                "replaced one",
                retry_after_seconds=RETRY_SECONDS,
            )

    async def _forget_unused(self) -> None:
        for held in list(self._held.values()):
            if not (self._is_current(held) or held.num_users):
                await self._engine.unload_adapter(held.label)
                del self._held[held.label]
                self._intake.discard(held.home)

    def _is_current(self, held: Held) -> bool:
        return self._current.get(held.name) is held

    def _free_version(self, name: str) -> str:
        """No one had it, and it is not to be had again."""
        while True:
            self._last_number += 1
            version = f"update-{self._last_number}"
            if f"{name}@{version}" not in self._digests:
                return version
