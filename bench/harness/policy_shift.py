"""A policy update that a drafter has not seen coming: the seedling, in another notation.

    python -m bench.harness.policy_shift --out build/drafter/other

Rows of the embedding, which is the head too, are exchanged: digits for other digits, and signs of
a response for bytes that it never used. The seedling is as sure of itself as before and says as
much; what follows what, in tokens, is another language.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

SEEDLING = Path(__file__).parents[2] / "examples" / "seedling" / "model"
EMBEDDING = "model.embed_tokens.weight"
EXCHANGED_BYTES = ("0123456789=:", "0729153846~;")
"""Zero stays, or numbers would begin with it. Of these prompts have digits alone."""


def permuted_rows(tokens: int) -> torch.Tensor:
    """Whose row each token has from now on."""
    words = AutoTokenizer.from_pretrained(SEEDLING)
    whose = torch.arange(tokens)
    for old, new in zip(*EXCHANGED_BYTES, strict=True):
        [one], [other] = words.encode(old), words.encode(new)
        whose[other] = one
        if not new.isdigit():
            whose[one] = other
    assert len(set(whose.tolist())) == tokens, "nothing is said twice"
    return whose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    shutil.copytree(SEEDLING, out, dirs_exist_ok=True)
    tensors = load_file(SEEDLING / "model.safetensors")
    embedding = tensors[EMBEDDING]
    tensors[EMBEDDING] = embedding[permuted_rows(len(embedding))].contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{out}: the seedling, in another notation")


if __name__ == "__main__":
    main()
