"""When there is news in a loss."""

import random
from collections.abc import Iterator

from engine.drafter.trainer.loss_tracker import LOOKED_BACK, Course


def rows(mean: float, number: int) -> Iterator[float]:
    """Of rows of a thousand tokens, each of which says something else."""
    chance = random.Random(number)
    return (mean * (1 + chance.gauss(0, 0.05)) for _ in range(number))


def settled(course: Course, losses: Iterator[float]) -> list[bool]:
    found = []
    for loss in losses:
        course.observed(loss)
        found.append(course.is_settled)
    return found


def test_a_loss_that_stays_is_settled_once_it_is_known() -> None:
    found = settled(Course(), rows(1.2, 4 * LOOKED_BACK))
    assert not any(found[: LOOKED_BACK - 1])
    assert all(found[LOOKED_BACK:])


def test_other_weights_are_news_until_they_are_learned() -> None:
    course = Course()
    settled(course, rows(1.2, 2 * LOOKED_BACK))
    falling = (3.0 - 1.8 * step / 1500 for step in range(1500))
    found = settled(course, falling)
    assert sum(found[20:]) < 20  # on its way up, what is looked back on passes what falls
    assert all(settled(course, rows(1.2, 2 * LOOKED_BACK))[LOOKED_BACK:])


def test_the_mean_is_of_all_steps_while_there_are_few() -> None:
    course = Course()
    for loss in (4.0, 2.0, 3.0):
        course.observed(loss)
    assert course.late == 3.0
