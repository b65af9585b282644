"""prime-rl's generation: renderers' own `generate`, over OpenAI's client, for two turns."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.client import OverlongPromptError, generate
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[3] / "examples" / "seedling" / "model"
SESSION = {"X-Session-ID": "trajectory-1"}


async def turns(url: str) -> dict[str, Any]:
    renderer = create_renderer(AutoTokenizer.from_pretrained(MODEL))
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        asked: dict[str, Any] = {
            "client": client,
            "renderer": renderer,
            "model": model,
            "sampling_params": {"max_tokens": 24, "temperature": 1.0},
            "cache_salt": "7",
            "priority": 1,
            "extra_headers": SESSION,
        }
        messages: list[Any] = [{"role": "user", "content": "Compute 12+34+56+78+90+12+34+56.\n"}]
        first = await generate(messages=messages, **asked)
        # The next turn begins with the exact tokens of the first: nothing is rendered again.
        longer = [*first["prompt_ids"], *first["completion_ids"], *first["prompt_ids"]]
        second = await generate(messages=messages, prompt_ids=longer, **asked)
        try:
            await generate(messages=messages, prompt_ids=[1] * 100_000, **asked)
            overlong = "was sent"
        except OverlongPromptError as error:
            overlong = str(error)
    told = ("completion_ids", "completion_logprobs", "finish_reason", "usage", "prompt_ids")
    return {
        "first": {name: first[name] for name in told},
        "second": {name: second[name] for name in told},
        "overlong": overlong,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(turns(sys.argv[1]))))
