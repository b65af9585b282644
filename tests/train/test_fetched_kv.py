"""Fetched prompt KV is used by coppice.train without a copy."""

from pathlib import Path

import pytest
import torch

from coppice import KvSource
from coppice.train import PromptKV as TrainingKV
from tests.client.test_kv import PROMPT, fetched, handle_from, server
from tests.fake_export import fake_kv


@pytest.mark.parametrize("transport", ["http", "shm"])
def test_training_uses_fetched_kv_without_a_copy(tmp_path: Path, transport: str) -> None:
    with server(tmp_path) as url:
        kv = fetched(handle_from(url), KvSource(url, transports=[transport]))
        taken = TrainingKV.of_named(kv.tensors())
        taken.check(2, len(PROMPT) - 1, torch.float32)
        expected = torch.from_numpy(fake_kv(PROMPT[:-1], "v0").astype("float32"))
        for layer in range(2):
            assert torch.equal(taken.keys[layer], expected[layer, 0])
            assert torch.equal(taken.values[layer], expected[layer, 1])
            keys, _ = kv.numpy(layer)
            assert taken.keys[layer].data_ptr() == keys.ctypes.data
        del keys, taken
