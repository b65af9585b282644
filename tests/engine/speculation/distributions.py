"""Models with a known distribution, and statistics of samples against it.

Of 32 tokens a few are likely, so that truncation matters and the distribution of a sequence can be
computed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.engine.random_models import CONFIG, HIDDEN, Tensors, random_tensors

VOCAB = 32
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A distribution to sample from."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def distribution(self, logits: Floats) -> Floats:
        """The reference definition: temperature, then top-k, then the nucleus of those."""
        scaled = logits / self.temperature
        order = np.argsort(-scaled, axis=-1)
        mass = np.take_along_axis(_softmax(scaled), order, axis=-1)
        if self.top_k:
            mass[..., self.top_k :] = 0
            mass /= mass.sum(axis=-1, keepdims=True)
        mass[np.cumsum(mass, axis=-1) - mass >= self.top_p] = 0
        distribution = np.zeros_like(mass)
        np.put_along_axis(distribution, order, mass / mass.sum(axis=-1, keepdims=True), axis=-1)
        return distribution

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


SETTINGS = (Setting(), Setting(temperature=0.7, top_p=0.9, top_k=20))


def write_small_model(folder: Path, *, memoryless: bool) -> Path:
    """Writes a model of 32 tokens.

    `memoryless`: the next token depends on the last token alone. Nothing is then added to its
    embedding in the residual stream, so that the distribution of a step has a closed form.
    """
    tensors = _with_small_vocabulary(random_tensors(3, tied=False, sharpness=2.6))
    if memoryless:
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = np.zeros_like(tensors[name])
    folder.mkdir(parents=True)
    config = CONFIG | {"tie_word_embeddings": False, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def next_token_logits(folder: Path, last: list[int]) -> Floats:
    """Logits of the memoryless model."""
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    embedded = tensors["model.embed_tokens.weight"][last].astype(np.float64)
    normed = embedded / np.sqrt((embedded**2).mean(axis=-1, keepdims=True) + 1e-6)
    logits: Floats = (normed * tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T
    return logits


def sequence_distribution(
    model: Any, prompt: list[int], setting: Setting, length: int, *, least: float
) -> dict[tuple[int, ...], float]:
    """Probabilities of the responses above `least`, by the model's own forward."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        begun = list(known)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + list(each) for each in begun])).logits[:, -1]
        distribution = setting.distribution(logits.double().numpy())
        known = {
            (*each, token): mass
            for each, row in zip(begun, distribution, strict=True)
            for token in range(VOCAB)
            if (mass := known[each] * row[token]) > least
        }
    return known


def chi_square(counts: NDArray[np.int64], distribution: Floats) -> tuple[float, int]:
    """Pearson's chi-square and its degrees of freedom.

    Outcomes with an expected count below five, and those outside the distribution, form one cell.
    """
    total = int(counts.sum())
    expected = total * distribution
    common = expected >= 5
    seen = np.append(counts[common], total - counts[common].sum())
    wanted = np.append(expected[common], total - expected[common].sum())
    seen, wanted = (seen, wanted) if wanted[-1] >= 5 else (seen[:-1], wanted[:-1])
    return float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1


def two_sample_chi_square(one: NDArray[np.int64], other: NDArray[np.int64]) -> tuple[float, int]:
    """Chi-square of the hypothesis that two samples have the same, unknown distribution."""
    common = one + other >= 10
    table = np.array([[*a[common], a[~common].sum()] for a in (one, other)], dtype=np.float64)
    table = table[:, table.sum(axis=0) > 0]
    wanted = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    return float(((table - wanted) ** 2 / wanted).sum()), table.shape[1] - 1


def independence_chi_square(table: NDArray[np.int64]) -> tuple[float, int]:
    """Chi-square of a table of pairs, against independence."""
    kept = table[np.ix_(table.sum(axis=1) > 0, table.sum(axis=0) > 0)].astype(np.float64)
    wanted = np.outer(kept.sum(axis=1), kept.sum(axis=0)) / kept.sum()
    return float(((kept - wanted) ** 2 / wanted).sum()), (kept.shape[0] - 1) * (kept.shape[1] - 1)


def p_value(statistic: tuple[float, int]) -> float:
    """The probability of a chi-square at least this large."""
    value, freedom = (torch.tensor(number, dtype=torch.float64) / 2 for number in statistic)
    return float(torch.special.gammaincc(freedom, value))


def _softmax(logits: Floats) -> Floats:
    raised: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    distribution: Floats = raised / raised.sum(axis=-1, keepdims=True)
    return distribution


def _with_small_vocabulary(tensors: Tensors) -> Tensors:
    rows = ("model.embed_tokens.weight", "lm_head.weight")
    return tensors | {name: tensors[name][:VOCAB] * np.float32(1.0) for name in rows}


assert HIDDEN > VOCAB, "tokens can be told apart"
