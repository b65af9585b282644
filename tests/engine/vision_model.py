"""A vision model of random weights (Idefics3) that is written in seconds, and images for it.

The weights are so large that images change the logprobs.
"""

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from tests.engine.seedling import MODEL

SIDE: Final = 32
"""Pixels of an image's side, after it was resized."""
PATCH: Final = 8
IMAGE_TOKENS: Final = (SIDE // PATCH) ** 2 // 4
PLACEHOLDER_TOKENS: Final = IMAGE_TOKENS + 3
"""Tokens of an image in a prompt: those of its embeddings, and three that mark their place."""
TEXT: Final[dict[str, Any]] = {
    "vocab_size": 280,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": 0.3,
}
PROCESSOR: Final = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "do_image_splitting": False,
}


def save_vision_model(directory: Path, *, seed: int = 5) -> Path:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    marks = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    tokenizer.add_tokens(marks, special_tokens=True)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = Idefics3Config(
        text_config=LlamaConfig(**TEXT),
        vision_config=VISION,
        image_token_id=image,
        scale_factor=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Idefics3ForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def noise(seed: int, side: int = 40) -> Image.Image:
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 255, (side, side, 3), dtype=np.uint8))


def data_url(image: Image.Image, **options: Any) -> str:
    return bytes_url(encoded(image, **options))


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    content = BytesIO()
    image.save(content, format, **options)
    return content.getvalue()


def bytes_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
