"""The shipped model for engine tests, in float32 so that rounding does not hide errors."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.settings import EngineSettings

MODEL = Path(__file__).parents[2] / "examples" / "seedling" / "model"
BLOCK = 32


def settings(model: Path = MODEL, **changes: Any) -> EngineSettings:
    small: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "seed": 0,
        "block_size": BLOCK,
        "cache_bytes": 2**27,
        "max_context_tokens": 1024,
        "max_sequences": 64,
        "cpu_threads": 1,
    }
    return EngineSettings(**(small | changes))


def reference(model: Path = MODEL) -> Any:
    """The same weights in Hugging Face's own forward."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def teacher_forced(
    model: Any,
    prompt: list[int],
    response: list[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[float]:
    """Reference log-probabilities of the response's tokens under the truncated distribution."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    logits = logits / temperature
    if top_k:
        kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    if top_p < 1.0:
        logits = _nucleus(logits, top_p)
    chosen = torch.tensor(response)[:, None]
    logprobs: list[float] = logits.log_softmax(-1).gather(-1, chosen)[:, 0].tolist()
    return logprobs


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Masks the logits outside the smallest set of top tokens with probability `top_p`."""
    ordered, places = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, before >= top_p)
    return logits.masked_fill(dropped, -torch.inf)
