"""Grid of bench.trainer_step: group shapes, model dtypes and vocabulary sizes."""

from dataclasses import dataclass
from typing import Self

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from coppice.train import TrainingGroup

SHAPES = ("1000/100x8", "4096/64x8", "512/512x8", "128/1024x8", "4096/64x16")


# Ratios that Castform's blog of 2026-05-11 reports for a step of Qwen3.5-4B on a GPU.
GPU_SHAPES = {"16384/64x8": 7.5, "8192/4096x8": 1.7}
DTYPES = ("float32", "bfloat16")
VOCABULARIES = (512, 32768)


# Minimum ratio of naive seconds to ours.
GOALS = {
    "float32": {"1000/100x8": 4.7, "4096/64x8": 7.5, "512/512x8": 1.65, "128/1024x8": 1.05},
    "bfloat16": {"1000/100x8": 4.5, "4096/64x8": 7.2, "512/512x8": 1.55, "128/1024x8": 1.03},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination in the grid of bench.trainer_step, written as 1000/100x8,float32,512.

    The text lists prompt and response tokens, samples, dtype and vocabulary.
    """

    prompt_tokens: int
    response_tokens: int
    num_samples: int
    dtype: str
    vocabulary: int

    @classmethod
    def of(cls, text: str) -> Self:
        shape, dtype, vocabulary = text.split(",")
        prompt, rest = shape.split("/")
        response, samples = rest.split("x")
        return cls(
            prompt_tokens=int(prompt),
            response_tokens=int(response),
            num_samples=int(samples),
            dtype=dtype,
            vocabulary=int(vocabulary),
        )

    def __str__(self) -> str:
        return f"{self.shape},{self.dtype},{self.vocabulary}"

    @property
    def shape(self) -> str:
        return f"{self.prompt_tokens}/{self.response_tokens}x{self.num_samples}"

    @property
    def goal(self) -> float | None:
        """Minimum speedup of a cell; None for the large vocabulary, where logits are costly."""
        return GOALS[self.dtype].get(self.shape) if self.vocabulary == VOCABULARIES[0] else None

    @property
    def published(self) -> float | None:
        return GPU_SHAPES.get(self.shape)

    def model(self) -> Qwen3ForCausalLM:
        """Create a model with 25M parameters besides its embedding, which is tied to the head."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        return Qwen3ForCausalLM(config).to(getattr(torch, self.dtype)).train()

    def group(self) -> TrainingGroup:
        generator = torch.Generator().manual_seed(1)

        def tokens(length: int) -> torch.Tensor:
            return torch.randint(0, self.vocabulary, (length,), generator=generator)

        return TrainingGroup(
            prompt=tokens(self.prompt_tokens),
            responses=tuple(tokens(self.response_tokens) for _ in range(self.num_samples)),
        )
