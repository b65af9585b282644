"""Multi-agent arithmetic task: add numbers that only the messages of other agents contain.

A prompt consists of the agent's own earlier work, the question with each peer's task, the peers'
messages, and a final request. Every peer starts from a number that its task does not contain:

    Compute 47-12.       own work: problems that the agent has solved, in the seedling's format
    47-12=35
    answer: 35
    question B-D.        the question, and the operations of every peer on its number
    D:+9-6
    B:+47
    8+9=17               D's message
    17-6=11
    D=11
    31+47=78             B's message
    B=78
    A: question          the final request; the response follows

    B-D.
    B=78
    D=11
    78-11=67
    answer: 67

Held-out questions are selected by their sum, here 78-11, like held-out problems.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from examples.seedling import arithmetic
from examples.seedling.arithmetic import Problem, Term

AGENTS = "ABCDE"
LARGEST = 99
LONGEST_SHORT_WORK = len("Compute 99*99.\n99*99=8910+891=9801\nanswer: 9801\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a multi-agent prompt: number of peer agents, and lengths of its parts.

    `own` is the maximum number of characters of the agent's own earlier work, `steps` the
    approximate number of calculation steps of each peer.
    """

    num_peers: int
    own: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question of the multi-agent task: the peers whose results to add, and the sum of these."""

    names: tuple[str, ...]
    sum: Problem

    @property
    def written_out(self) -> str:
        """Step-by-step response that repeats each peer's result just before adding it."""
        lines, total = [f"{self}."], 0
        for index, (name, term) in enumerate(zip(self.names, self.sum.terms, strict=True)):
            before, total = total, total + term.sign * term.size
            lines.append(f"{name}={term.size}")
            lines += [f"{before}{_mark(term)}{term.size}={total}"] if index else []
        return "\n".join([*lines, f"answer: {total}"])

    def reward(self, response: str) -> float:
        """Reward of a response: 1.0 if the last line has the right answer, else 0.0.

        The steps are not checked.
        """
        return arithmetic.reward(self.sum.prompt, response)

    def __str__(self) -> str:
        first, *rest = zip(self.names, self.sum.terms, strict=True)
        return first[0] + "".join(f"{_mark(term)}{name}" for name, term in rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Prompt of one agent, split into parts of its own and parts shared with other agents.

    `own` is the agent's earlier work, `told` the question with the tasks of the peers, `said` the
    messages of the peers, `ask` the final request. `told` and `said` are the shared parts.
    """

    own: str
    told: str
    said: tuple[str, ...]
    ask: str
    question: Question
    later: tuple[Question, ...] = ()
    """Further questions, each of which follows the answer to the previous one."""

    @property
    def prompt(self) -> str:
        return "".join((self.own, self.told, *self.said, self.ask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Task of a peer agent, with its calculation steps and its result."""

    task: str
    lines: tuple[str, ...]
    result: int


def draw(rng: random.Random, shape: Shape, *, held_out: bool, num_later: int = 0) -> Turn:
    """Draws a random multi-agent prompt with training questions only or held-out ones only."""
    while True:
        agent, *peers = rng.sample(AGENTS, 1 + shape.num_peers)
        works = {peer: _work(rng, max(1, shape.steps + rng.choice((-1, 0, 1)))) for peer in peers}
        question, *later = (_question(rng, works) for _ in range(1 + num_later))
        if all(asked.sum.held_out == held_out for asked in (question, *later)):
            break
    tasks = "".join(f"{peer}:{work.task}\n" for peer, work in works.items())
    return Turn(
        own=_own(rng, shape.own, held_out=held_out),
        told=f"question {question}.\n{tasks}",
        said=tuple("\n".join([*w.lines, f"{peer}={w.result}\n"]) for peer, w in works.items()),
        ask=f"{agent}: question ",
        question=question,
        later=tuple(later),
    )


def _own(rng: random.Random, length: int, *, held_out: bool) -> str:
    text = ""
    while len(text) + LONGEST_SHORT_WORK <= length:
        problem = arithmetic.draw(rng, held_out=held_out)
        solved = f"{problem.prompt}{arithmetic.written_out(problem)}\n"
        if len(text) + len(solved) <= length:
            text += solved
    return text


def _work(rng: random.Random, num_steps: int) -> Work:
    """Draws a peer's task with its solution; all intermediate numbers are at most LARGEST."""
    total, task, lines = rng.randint(1, LARGEST), "", []
    for _ in range(num_steps):
        before, total = total, _other(rng, total)
        step = f"{'+' if total > before else '-'}{abs(total - before)}"
        task += step
        lines.append(f"{before}{step}={total}")
    return Work(task=task, lines=tuple(lines), result=total)


def _other(rng: random.Random, value: int) -> int:
    other = rng.randint(1, LARGEST - 1)
    return other if other < value else other + 1


def _question(rng: random.Random, works: Mapping[str, Work]) -> Question:
    names = tuple(rng.sample(list(works), rng.randint(2, min(3, len(works)))))
    return Question(names=names, sum=_sum(rng, [works[name].result for name in names]))


def _sum(rng: random.Random, values: list[int]) -> Problem:
    terms, total = [Term(sign=1, left=values[0])], values[0]
    for value in values[1:]:
        sign = -1 if value <= total and rng.random() < 0.4 else 1
        terms.append(Term(sign=sign, left=value))
        total += sign * value
    return Problem(terms=tuple(terms))


def _mark(term: Term) -> str:
    return "+" if term.sign > 0 else "-"
