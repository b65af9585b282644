"""Files of another process that are truncated while they are read."""

from pathlib import Path

import pytest

from tests.engine.shrinking import READERS, read_while_it_shrinks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("reader", sorted(READERS))
def test_file_truncated_while_it_is_checked_is_refused(tmp_path: Path, reader: str) -> None:
    status, refused = read_while_it_shrinks(reader, tmp_path / "model.safetensors")
    assert status == 0, "a mapped file that shrinks ends the process with SIGBUS"
    assert refused > 0
