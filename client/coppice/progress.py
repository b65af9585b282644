"""Optional progress bar of finished samples."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from coppice.wire.records import Record, SampleRecord, SegmentRecord
from coppice.wire.rollouts import RolloutRequest


@contextmanager
def progress_bar(
    request: RolloutRequest, *, is_enabled: bool
) -> Iterator[Callable[[Record], None]]:
    """Yields a callback that must be called with every record."""
    if not is_enabled:
        yield lambda record: None
        return
    branching = request.branching
    total = sum(group.n if branching is None else branching.max_leaves for group in request.groups)
    with _tqdm()(total=total, desc="rollout", unit="sample") as bar:

        def on_record(record: Record) -> None:
            if isinstance(record, SegmentRecord):
                bar.update(record.segment.finish_reason != "cut")
            elif isinstance(record, SampleRecord) and branching is None:
                bar.update()

        yield on_record


def _tqdm() -> Any:
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError:
        raise ImportError(
            "progress=True needs tqdm: pip install 'coppice-client[progress]'"
        ) from None
