"""The benchmark of several engines in one service."""

from bench.data_parallel import GROUPS, ONE, TWO, prompts, record


def test_prompts_are_new_in_every_run() -> None:
    found = [tuple(prompt) for number in range(60) for prompt in prompts(number, GROUPS)]
    assert len({prompt[:2] for prompt in found}) == len(found)


def test_record_compares_both_configurations_for_each_number_of_groups() -> None:
    arms = {
        f"{ONE}, {GROUPS}": [100.0, 100.0],
        f"{TWO}, {GROUPS}": [120.0, 120.0],
        f"{ONE}, 1": [50.0, 50.0],
        f"{TWO}, 1": [25.0, 25.0],
    }
    all_groups, single = record(arms, num_threads=2).rows
    assert all_groups.value == "1.200 [1.200, 1.200] (120 / 100 tokens/s)"
    assert single.value == "0.500 [0.500, 0.500] (25 / 50 tokens/s)"
