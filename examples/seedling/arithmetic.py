"""Arithmetic problems, step-by-step solutions, and the reward of a response.

A problem is a sum of one to MAX_TERMS terms; a term is a number or a product of two numbers. The
number of terms has a Pareto distribution, so most responses are short and some are very long.
Held-out problems are selected by a hash of their text, so no training run can contain one.
"""

import hashlib
import random
import re
from dataclasses import dataclass

MAX_TERMS = 16
HELD_OUT_FRACTION = 1 / 16

_EXPRESSION = re.compile(r"\d+(?:\*\d+)?(?:[+-]\d+(?:\*\d+)?)*")
_TERM = re.compile(r"([+-]?)(\d+)(?:\*(\d+))?")
_ANSWER = re.compile(r"(?:.*\n)?answer: (0|-?[1-9]\d*)\n*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Term of a sum: a signed number, or a signed product if `right` is given."""

    sign: int
    left: int
    right: int | None = None

    @property
    def size(self) -> int:
        return self.left if self.right is None else self.left * self.right

    def __str__(self) -> str:
        return str(self.left) if self.right is None else f"{self.left}*{self.right}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Arithmetic problem: a sum of signed terms, the first of which is positive."""

    terms: tuple[Term, ...]

    @property
    def answer(self) -> int:
        return sum(term.sign * term.size for term in self.terms)

    @property
    def prompt(self) -> str:
        return f"Compute {self}.\n"

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(str(self).encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_FRACTION * 2**32

    def __str__(self) -> str:
        first, *rest = self.terms
        return str(first) + "".join(f"{'+' if t.sign > 0 else '-'}{t}" for t in rest)


def draw(rng: random.Random, *, held_out: bool) -> Problem:
    """Draws a random arithmetic problem, either for training or held out."""
    while True:
        num_terms = min(MAX_TERMS, int(rng.paretovariate(1.0)))
        problem = _draw_terms(rng, num_terms)
        if problem.held_out == held_out:
            return problem


def written_out(problem: Problem) -> str:
    """Step-by-step response to a problem, with one calculation per line."""
    total = 0
    lines = []
    for index, term in enumerate(problem.terms):
        if term.right is not None:
            lines.append(_product_line(term.left, term.right))
        if index > 0:
            before, total = total, total + term.sign * term.size
            lines.append(f"{before}{'+' if term.sign > 0 else '-'}{term.size}={total}")
        else:
            total = term.size
    return "\n".join([*lines, f"answer: {total}"])


def at_once(problem: Problem) -> str:
    """Response to a problem with the answer only: short, and hard to get right."""
    return f"answer: {problem.answer}"


def parse(prompt: str) -> Problem:
    """Finds the arithmetic problem in a prompt; ValueError if there is not exactly one."""
    found = [text for text in _EXPRESSION.findall(prompt) if not text.isdigit()]
    if len(found) != 1:
        raise ValueError(f"expected one arithmetic expression in the prompt, found {len(found)}")
    return Problem(
        terms=tuple(
            Term(
                sign=-1 if sign == "-" else 1,
                left=int(left),
                right=int(right) if right else None,
            )
            for sign, left, right in _TERM.findall(found[0])
        )
    )


def reward(prompt: str, response: str) -> float:
    """Reward of a response: 1.0 if the last line has the right answer, else 0.0.

    The steps are not checked.
    """
    stated = _ANSWER.fullmatch(response)
    return float(stated is not None and int(stated[1]) == parse(prompt).answer)


def _draw_terms(rng: random.Random, num_terms: int) -> Problem:
    # A single term is always a product: a plain number such as "47" is no problem.
    first_is_product = num_terms == 1 or rng.random() < 0.4
    first = _draw_factors(rng, 99) if first_is_product else Term(sign=1, left=rng.randint(1, 99))
    terms = [first]
    total = first.size
    for _ in range(num_terms - 1):
        product = rng.random() < 0.2
        term = _draw_factors(rng, 9) if product else Term(sign=1, left=rng.randint(1, 99))
        if term.size <= total and rng.random() < 0.3:
            term = Term(sign=-1, left=term.left, right=term.right)
        terms.append(term)
        total += term.sign * term.size
    return Problem(terms=tuple(terms))


def _draw_factors(rng: random.Random, largest_right: int) -> Term:
    return Term(sign=1, left=rng.randint(2, 99), right=rng.randint(2, largest_right))


def _product_line(left: int, right: int) -> str:
    tens, ones = right - right % 10, right % 10
    parts = f"={left * tens}+{left * ones}" if tens and ones else ""
    return f"{left}*{right}{parts}={left * right}"
