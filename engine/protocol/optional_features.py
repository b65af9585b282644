"""Protocol of an engine's optional features: counters, and access to the draft model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from engine.types.feature_stats import DrafterStatus

Stats = TypeVar("Stats")
Interface = TypeVar("Interface")


@dataclass(frozen=True, slots=True)
class FeatureKey(Generic[Interface]):
    """Name of a feature that the service controls, with the type of its interface."""

    name: str


class DraftModel(Protocol):
    """The draft model of a running engine.

    file: all tensors of the serving draft model. The file may be replaced at any later time.
    check: as `check_weights`, against the draft model.
    submit: moves the validated file away, outside the event loop, for a test. DrafterRefused: the
        file was not moved.
    """

    @property
    def file(self) -> Path: ...

    def status(self) -> DrafterStatus: ...

    def check(self, path: Path) -> None: ...

    async def submit(self, path: Path, version: str) -> None: ...


DRAFT_MODEL: Final[FeatureKey[DraftModel]] = FeatureKey("drafter")


class Features(Protocol):
    """Access to the features by the types of their counters and interfaces.

    stats: counters of the last heartbeat, at most two seconds old; zeros of a feature that is off.
    feature: None while the feature is off.
    """

    def stats(self, kind: type[Stats]) -> Stats: ...

    def feature(self, key: FeatureKey[Interface]) -> Interface | None: ...
