"""Samples that upstream gets wrong on CPU, and the script that draws them without the patches.

A patch cannot be removed from a process, so the script runs in one of its own: `python -m
tests.engine.upstream_defects MODEL` prints the outcome as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engine.bigram_proposer import NUM_DRAFTED
from tests.engine.stepped_engine import Answer, LiveEngine

TEMPERATURE = 0.7
SPECULATION: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "speculative_config": {
        "method": "custom_class",
        "model": "tests.engine.bigram_proposer.Proposer",
        "num_speculative_tokens": NUM_DRAFTED,
    },
}
REPEATING = [[20 * i + j % 5 for j in range(20)] for i in range(1, 9)]
LONG = [(7 * i) % 500 for i in range(150)]


def draw_with_drafts(engine: LiveEngine) -> list[Answer]:
    return engine.ask(*REPEATING, max_tokens=150, temperature=TEMPERATURE)


def draw_with_seed(engine: LiveEngine) -> Answer:
    """The prompt is longer than a step's tokens."""
    (answer,) = engine.ask(LONG, max_tokens=12, temperature=1.0, seed=3)
    return answer


def main(model: Path) -> dict[str, Any]:
    os.environ["VLLM_PLUGINS"] = ""
    engine = LiveEngine(model, patched=False, **SPECULATION)
    drafted = [answer.token_ids for answer in draw_with_drafts(engine)]
    try:
        draw_with_seed(engine)
    except RuntimeError as error:
        return {"drafted": drafted, "seeded": str(error)}
    return {"drafted": drafted, "seeded": None}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
