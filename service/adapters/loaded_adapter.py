"""Record of one adapter version that is loaded in the engine."""

from dataclasses import dataclass
from pathlib import Path

from coppice.wire.adapters import AdapterAnswer
from engine.types import AdapterInfo


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedAdapter:
    """One loaded adapter version.

    `folder` is the server's private copy of its files. `num_users` counts the running rollouts and
    scoring requests that use it.
    """

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
