"""One version of one adapter, for as long as the engine holds it."""

from dataclasses import dataclass
from pathlib import Path

from coppice.wire.adapters import AdapterAnswer
from engine.protocol import AdapterInfo


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedAdapter:
    """`folder` is our own copy of its files; `num_users` are the rollouts and scores under it."""

    name: str
    version: str
    form: AdapterInfo
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
            rank=self.form.rank,
            num_bytes=self.form.num_bytes,
            rollouts_running=self.num_users,
        )
