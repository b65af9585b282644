"""TRL's client of a teacher, as its server-based distillation trainers call it."""

import json
import sys
from typing import Any

from trl.generation.vllm_client import VLLMClient


def main(url: str, sequence: list[int], num_prompt_tokens: int) -> Any:
    client = VLLMClient(url)
    return client.get_sequence_logprobs([sequence], [num_prompt_tokens], top_logprobs=3)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))))
