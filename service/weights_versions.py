"""Table of weights versions and their states, and checks of `WeightsConstraint`.

A version has its publisher's label and an integer sequence number, which orders versions
identically on every replica. Exactly one version is active. The table accesses no files and no
engine.

    incomplete -> staged -> active -> superseded -> active (a rollback) ...
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from coppice.weights.checkpoint_files import SINGLE_FILE
from coppice.wire.rollouts import WeightsConstraint
from coppice.wire.weights import VersionAnswer, VersionState
from engine.weights.ipc_tensors import WeightTransfer
from service.errors import (
    BaseUnavailable,
    RollbackRefused,
    VersionConflict,
    VersionNotFound,
    VersionSuperseded,
    VersionUnavailable,
)

RETRY_SECONDS = 1.0
RANDOM = "random"
WHY_RANDOM = "the server has random weights (engine.load_format dummy)"
MAX_SEQUENCE = 2**53 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Weights version: label, sequence number, state, and files.

    `owned` means that its files were uploaded, so the server may delete them. `delta_sha256` is the
    digest of the delta from which it was uploaded; the delta is stored too. `announced` means that
    the version is published in the cluster registry. `xxh3_128` is the checksum of a version that
    was uploaded as one file. `digests` has the SHA-256 of each file, once it is needed.
    `received_at` is the monotonic time at which the last file was received. `fingerprint` is that
    of files which the publisher has named by their path.

    A version without files (`has_files`) was handed over in GPU memory, and is activated once.
    `transfer` is set while its publisher waits. Weights that `is_random` are the only ones that
    their server serves, and no request may require them by name.
    """

    label: str
    sequence: int
    state: VersionState
    path: Path
    num_bytes: int
    owned: bool
    received_bytes: int = 0
    base: str | None = None
    delta_sha256: str | None = None
    announced: bool = False
    xxh3_128: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    missing_files: tuple[str, ...] = ()
    received_at: float = 0.0
    fingerprint: str | None = None
    has_files: bool = True
    is_random: bool = False
    transfer: WeightTransfer | None = None

    @property
    def may_change(self) -> bool:
        """True if its files are not the server's own, so that others may change them."""
        return self.has_files and not self.owned

    def check_available(self) -> None:
        """Refuse tensors in GPU memory whose publisher does not wait: it may have changed them."""
        if self.has_files:
            return
        if self.transfer is None:
            raise publish_again()
        if self.transfer.is_withdrawn:
            raise VersionConflict("the publisher has closed its connection; nothing was loaded")

    def answer(self) -> VersionAnswer:
        return VersionAnswer(
            version=self.label,
            sequence=self.sequence,
            state=self.state,
            num_bytes=self.num_bytes,
            received_bytes=self.received_bytes,
            base=self.base,
            sha256=next(iter(self.digests.values())) if len(self.digests) == 1 else None,
            xxh3_128=self.xxh3_128,
            missing_files=list(self.missing_files),
            has_files=self.has_files,
        )


def first_version(label: str, *, is_random: bool = False) -> Version:
    """Table entry for the weights that the engine starts with; not uploaded, so not owned.

    Random weights are not those that the label means, so theirs is RANDOM.
    """
    return Version(
        label=RANDOM if is_random else label,
        sequence=0,
        state="active",
        path=Path(),  # known to the engine only
        num_bytes=0,
        owned=False,
        is_random=is_random,
    )


class Versions:
    """Table of this replica's weights versions; all methods are synchronous, on one event loop.

    `epoch` counts activations. Equal epochs imply the same weights; equal labels do not.
    """

    def __init__(self, first: Version, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert first.state == "active"
        self._clock = clock
        self._activated_at = clock()
        self._versions = {first.label: first}
        self._with_files = first.label
        self._activating: str | None = None
        self._remote_sequences: dict[str, int] = {}
        self.epoch = 0

    @property
    def active(self) -> Version:
        return next(v for v in self._versions.values() if v.state == "active")

    @property
    def active_seconds(self) -> float:
        """Time since the active version was activated, or since the start."""
        return self._clock() - self._activated_at

    def all(self) -> list[Version]:
        return sorted(self._versions.values(), key=lambda version: version.sequence)

    def get(self, label: str) -> Version:
        if label not in self._versions:
            raise VersionNotFound()
        return self._versions[label]

    def find(self, label: str) -> Version | None:
        return self._versions.get(label)

    def learn_sequences(self, sequences: Mapping[str, int]) -> None:
        """Record the sequence numbers of versions that the cluster registry lists."""
        self._remote_sequences |= sequences

    def sequence_of(self, label: str) -> int | None:
        known = self.find(label)
        return self._remote_sequences.get(label) if known is None else known.sequence

    def next_sequence(self) -> int:
        known = (version.sequence for version in self._versions.values())
        following = max(chain(known, self._remote_sequences.values())) + 1
        if following > MAX_SEQUENCE:
            raise VersionConflict("a version has the largest sequence: give this one explicitly")
        return following

    def sequence_for(self, label: str, sequence: int | None) -> int:
        """Sequence number of a version to be added, for which `sequence` may have been requested.

        Refuses one that conflicts with the label or with another version.
        """
        self.check_replaceable()
        if sequence is None:
            known = self.sequence_of(label)
            return self.next_sequence() if known is None else known
        self.check_sequence(label, sequence)
        existing = self.find(label)
        if existing is not None and existing.sequence != sequence:
            raise VersionConflict(f"the version has sequence {existing.sequence}")
        return sequence

    def check_sequence(self, label: str, sequence: int) -> None:
        """Refuse a sequence number that another version has, since `min_version` compares them."""
        holder = next((v for v in self._versions.values() if v.sequence == sequence), None)
        if holder is not None and holder.label != label:
            raise VersionConflict(f"{holder.label!r} already has sequence {sequence}")

    def put(self, version: Version) -> Version:
        self.check_sequence(version.label, version.sequence)
        self._versions[version.label] = version
        return version

    def remove(self, label: str) -> Version:
        version = self.get(label)
        if version.state == "active":
            raise VersionConflict("the active version cannot be deleted")
        if self.is_activating(label):
            raise VersionConflict("the version is being activated")
        if version.transfer is not None:
            raise VersionConflict("the version is being handed over in GPU memory")
        if self.is_restorable(label):
            raise VersionConflict(
                "the active version has no files, so this one is served if an activation fails"
            )
        return self._versions.pop(label)

    def find_excess(self, limit: int) -> str | None:
        """Label of the oldest superseded version that may be deleted, if there are more than that.

        Uploaded versions and those without files are counted apart.
        """
        removable = [
            version
            for version in self.all()
            if version.state == "superseded"
            and version.transfer is None
            and not self.is_activating(version.label)
            and not self.is_restorable(version.label)
        ]
        uploaded = [version.label for version in removable if version.owned]
        without_files = [version.label for version in removable if not version.has_files]
        return next(
            (labels[0] for labels in (uploaded, without_files) if len(labels) > limit), None
        )

    def is_base(self, label: str | None) -> bool:
        """True if a weight delta can be based on a version: it must have been uploaded as one file.

        The digest is known only for such a file, and only such a file cannot be changed by others.
        """
        version = None if label is None else self.find(label)
        return version is not None and version.digests.keys() == {SINGLE_FILE}

    def get_base(self, label: str) -> Version:
        if not self.is_base(label):
            raise BaseUnavailable(f"no version {label!r} that was uploaded as one file is here")
        return self.get(label)

    def is_restorable(self, label: str) -> bool:
        """True for the version that the engine serves if it loses an active one without files."""
        return not self.active.has_files and label == self._with_files

    def end_transfer(self, label: str) -> None:
        """Remove a version without files, which its publisher may change now, unless it is active.

        The label of an earlier active version stays, as it orders versions.
        """
        version = self.find(label)
        if version is None or version.has_files:
            return
        self._versions[label] = replace(version, transfer=None)
        if version.state == "staged":
            self.forget(label)

    @contextmanager
    def activating(self, label: str) -> Iterator[None]:
        """Context manager in which a version that is about to be active cannot be deleted."""
        self._activating = label
        try:
            yield
        finally:
            self._activating = None

    def is_activating(self, label: str) -> bool:
        return self._activating == label

    def forget(self, label: str) -> None:
        """Remove a version that never became complete from the table."""
        self._versions.pop(label, None)

    def admit(self, constraint: WeightsConstraint | None) -> str | None:
        """Check the weights constraint of a rollout against the active version.

        Returns the label that the rollout is bound to, or None. Raises if the rollout may not run
        now.
        """
        if constraint is None:
            return None
        if self.active.is_random:
            raise VersionSuperseded(f"{WHY_RANDOM}, and no weights version")
        if constraint.exact_version is not None:
            return self._admit_exact(constraint.exact_version)
        assert constraint.min_version is not None
        sequence = self.sequence_of(constraint.min_version)
        if sequence is None or sequence > self.active.sequence:
            raise _version_unavailable(constraint.min_version)
        return None

    def check_replaceable(self) -> None:
        """Refuse versions of a server with random weights.

        A load that fails would leave weights of the model's files under the name of random ones.
        """
        if self.active.is_random:
            raise VersionConflict(f"{WHY_RANDOM}, which no version can replace")

    def check_activation(self, label: str, *, allow_rollback: bool) -> Version:
        self.check_replaceable()
        version = self.get(label)
        if version.state == "incomplete":
            missing = ", ".join(version.missing_files)
            raise VersionConflict(f"the version is incomplete; missing files: {missing}")
        if version.sequence < self.active.sequence and not allow_rollback:
            raise RollbackRefused(
                f"sequence {version.sequence} is older than the active {self.active.sequence}"
            )
        return version

    def check_has_files(self, label: str) -> None:
        """Refuse a version in GPU memory, which only its publisher's call can activate."""
        version = self.find(label)
        if version is not None and not version.has_files and version != self.active:
            raise publish_again()

    def announced(self, label: str, announced: bool) -> None:
        self._versions[label] = replace(self._versions[label], announced=announced)

    def activated(self, label: str) -> None:
        self._versions[self.active.label] = replace(self.active, state="superseded")
        self._versions[label] = replace(self._versions[label], state="active")
        self._activated_at = self._clock()
        if self.active.has_files:
            self._with_files = label
        self.epoch += 1

    def _admit_exact(self, label: str) -> str:
        if label == self.active.label:
            return label
        sequence = self.sequence_of(label)
        if sequence is not None and sequence > self.active.sequence:
            raise _version_unavailable(label)
        raise VersionSuperseded(f"{self.active.label!r} is active")


def publish_again() -> VersionConflict:
    return VersionConflict("the version was handed over in GPU memory: publish it again")


def _version_unavailable(label: str) -> VersionUnavailable:
    return VersionUnavailable(f"{label!r} is not active yet", retry_after_seconds=RETRY_SECONDS)
