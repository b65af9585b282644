"""A freshly initialized drafter for the models of `tests.engine.random_models`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.drafter.service.initial_model import make_drafter_config, write_random_model
from tests.engine.random_models import CONFIG


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, as in the trainer: two would wait for each other on a busy second core."""
    before_schedule = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before_schedule)


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    write_random_model(folder, make_drafter_config(CONFIG, 10**6, ranks=1))
    return folder
