"""Runs tool-calling rollouts (calculator) against a server: `python -m examples.agent URL`."""

import random
import sys

import httpx
from transformers import AutoTokenizer

from examples.agent.rollout import rollout
from examples.seedling import arithmetic
from examples.seedling.enlarge import SEEDLING


def main(url: str) -> None:
    words = AutoTokenizer.from_pretrained(SEEDLING)
    rng = random.Random(7)
    with httpx.Client(base_url=url, timeout=60) as http:
        for number in range(4):
            problem = arithmetic.draw(rng, held_out=True)
            row = rollout(http, words, problem.prompt, session=f"trajectory-{number}")
            response = words.decode(row.response, skip_special_tokens=True)
            print(f"{problem.prompt}{response}")
            print(
                f"  reward {arithmetic.reward(problem.prompt, response):.0f}, "
                f"{sum(row.sampled)} of {len(row.sampled)} tokens sampled, "
                f"cached by turn {row.cached_tokens}\n"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
