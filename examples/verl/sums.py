"""Data set and reward for verl: `python -m examples.verl.sums FILE` writes the data set."""

import random
import sys

from datasets import Dataset

from examples.seedling import arithmetic


def rows(count: int) -> list[dict[str, object]]:
    rng = random.Random(1)
    problems = [arithmetic.draw(rng, held_out=False) for _ in range(count)]
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": problem.prompt.strip()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem)},
            "extra_info": {"index": index},
        }
        for index, problem in enumerate(problems)
    ]


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    return arithmetic.reward(ground_truth, solution_str)


if __name__ == "__main__":
    Dataset.from_list(rows(64)).to_parquet(sys.argv[1])
