"""Writes a policy update unknown to the drafter: the test model writing in another notation.

    python -m bench.harness.policy_shift --out build/drafter/other

Rows of the embedding, which is tied to the head, are permuted: digits with other digits, and signs
of a response with unused bytes. Entropy and lengths of the seedling's responses do not change, but
their token sequences do.
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
"""Permuted bytes.

Zero is fixed, so that no number starts with it. Prompts contain only the digits.
"""


def permuted_rows(tokens: int) -> torch.Tensor:
    """For each token, the row of the old embedding that becomes its row in the new one."""
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
