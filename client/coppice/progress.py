"""A bar of finished samples, for those who ask for one."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from coppice.wire.records import Record, SampleRecord, SegmentRecord
from coppice.wire.rollouts import RolloutRequest


@contextmanager
def progress_bar(request: RolloutRequest, *, wanted: bool) -> Iterator[Callable[[Record], None]]:
    """Yields what is to be told of every record."""
    if not wanted:
        yield lambda record: None
        return
    grown = request.branching
    total = sum(group.n if grown is None else grown.max_leaves for group in request.groups)
    with _tqdm()(total=total, desc="rollout", unit="sample") as bar:

        def tell(record: Record) -> None:
            if isinstance(record, SegmentRecord):
                bar.update(record.segment.finish_reason != "cut")
            elif isinstance(record, SampleRecord) and grown is None:
                bar.update()

        yield tell


def _tqdm() -> Any:
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError:
        raise ImportError(
            "progress=True needs tqdm: pip install 'coppice-client[progress]'"
        ) from None
