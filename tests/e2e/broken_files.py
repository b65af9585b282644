"""Weights files that must be refused, and the expected reason for each."""

import pickle
from pathlib import Path

import numpy as np
from safetensors.numpy import save, save_file

from tests.engine.random_models import Tensors

NAMED = "model.norm.weight"


def broken_files(tensors: Tensors, folder: Path) -> dict[Path, str]:
    """Each file, and a word that its refusal must contain."""
    whole = save(tensors)
    norm = tensors[NAMED]
    poisoned = norm.copy()
    poisoned[3] = np.nan
    raw = {
        "truncated": (whole[:-100], "model.safetensors"),
        "noisy": (np.random.default_rng(0).bytes(5000), "model.safetensors"),
        "pickled": (pickle.dumps({"weight": [1.0]}), "model.safetensors"),
    }
    changed = {
        "shape": (tensors | {NAMED: np.ones(7, np.float32)}, NAMED),
        "dtype": (tensors | {NAMED: norm.astype(np.int8)}, NAMED),
        "nan": (tensors | {NAMED: poisoned}, NAMED),
        "missing": ({name: t for name, t in tensors.items() if name != NAMED}, NAMED),
    }
    varied_texts = {}
    for name, (content, word) in raw.items():
        (folder / name).write_bytes(content)
        varied_texts[folder / name] = word
    for name, (values, word) in changed.items():
        save_file(values, folder / name)
        varied_texts[folder / name] = word
    return varied_texts
