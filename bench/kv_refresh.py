"""Benchmark: parts of kept KV computed again after each update, against `max_lag`.

Conversations continue by one turn after each update of the GRPO example, as in
`bench.kv_across_updates`. Reference models in float32 hold the KV of each conversation and compute
a part of it again in place: later KV stays, although it attended to the former one. All methods
have the same tokens, which exact KV samples. Compared are the KL divergence of the
distributions of these tokens from those over exact KV, and the number of tokens computed again.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.harness.grpo_checkpoints import checkpoints
from bench.harness.record import Record, Row
from bench.kv_across_updates import Estimate, parse_options
from examples.grpo.questions import Questions
from examples.seedling.enlarge import SEEDLING

TURN_TOKENS: Final = 48
PERIODS: Final = (2, 3, 5)
"""Number of updates in which all KV is computed again; that of `max_lag` L is L + 1."""

Window = tuple[int, int]
Choice = Callable[[int, Sequence[int]], list[Window]]
"""Positions to compute again, from a number that counts updates and the update of each position."""


def nothing(update: int, computed_in: Sequence[int]) -> list[Window]:
    return []


def whole_context(period: int) -> Choice:
    """`max_lag`: the whole context in every update of that number."""
    return lambda update, computed_in: [(0, 0 if update % period else len(computed_in))]


def oldest_part(period: int) -> Choice:
    """The positions that were computed the longest ago, in each update; the first among equals."""

    def choose(update: int, computed_in: Sequence[int]) -> list[Window]:
        positions = sorted(range(len(computed_in)), key=computed_in.__getitem__)
        return _windows(sorted(positions[: len(positions) // period]))

    return choose


def last_part(period: int) -> Choice:
    """The last part of the context, in each update."""

    def choose(update: int, computed_in: Sequence[int]) -> list[Window]:
        length = len(computed_in)
        return [(length - length // period, length)]

    return choose


def _windows(positions: Sequence[int]) -> list[Window]:
    """Windows of consecutive positions, from sorted ones."""
    ends = [i for i, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1]
    bounds = pairwise([0, *ends, len(positions)]) if positions else ()
    return [(positions[first], positions[end - 1] + 1) for first, end in bounds]


METHODS: Final[Mapping[str, Mapping[int, Choice]]] = {
    "whole context": {period: whole_context(period) for period in PERIODS},
    "oldest part": {period: oldest_part(period) for period in PERIODS},
    "last part": {period: last_part(period) for period in PERIODS},
}


class Context:
    """KV of a conversation, [heads, positions, channels] per layer for keys and values."""

    def __init__(self) -> None:
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.computed_in: list[int] = []
        """Number of the update that computed each position."""

    @property
    def length(self) -> int:
        return len(self.computed_in)

    def compute(
        self, model: Any, token_ids: Sequence[int], start: int, *, update: int = 0
    ) -> torch.Tensor:
        """Compute the KV of tokens from `start` on, and replace what is there; returns logits."""
        cache = DynamicCache()
        for index, (keys, values) in enumerate(self._layers):
            cache.update(keys[:, :, :start], values[:, :, :start], index)
        output = model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True)
        end, old = start + len(token_ids), self._layers
        self.computed_in[start:end] = [update] * len(token_ids)
        computed = [(layer.keys, layer.values) for layer in cache.layers]
        rest = old or [(k[:, :, :0], v[:, :, :0]) for k, v in computed]
        self._layers = [
            (torch.cat([k, old_k[:, :, end:]], 2), torch.cat([v, old_v[:, :, end:]], 2))
            for (k, v), (old_k, old_v) in zip(computed, rest, strict=True)
        ]
        logits: torch.Tensor = output.logits[0]
        return logits


@dataclass(slots=True)
class Measured:
    """Divergences of a conversation's tokens with one method, and its number of tokens."""

    kl: list[float]
    num_computed_again: int = 0


def run(
    models: Mapping[str, Any], conversation: int, questions: Sequence[Sequence[int]]
) -> tuple[dict[str, Measured], int]:
    """Measurements of a conversation by method, and the tokens of contexts in all turns."""
    torch.manual_seed(conversation)
    token_ids: list[int] = []
    methods = {name: (choice, Context(), Measured([])) for name, choice in _choices()}
    num_context_tokens = 0
    for update, (model, question) in enumerate(zip(models.values(), questions, strict=True)):
        start = len(token_ids)
        num_context_tokens += start if update else 0
        exact, new = _sample(model, [*token_ids, *question])
        for choice, context, measured in methods.values():
            # Conversations begin at different updates of a period, so that its phase is averaged.
            windows = choice(update + conversation, context.computed_in) if update else []
            for first, end in windows:
                measured.num_computed_again += end - first
                if end > first:
                    context.compute(model, token_ids[first:end], first, update=update)
            logits = context.compute(model, [*question, *new], start, update=update)
            if update:
                measured.kl += _kl(logits[len(question) - 1 : -1], exact)
        token_ids += [*question, *new]
    return {name: measured for name, (_, _, measured) in methods.items()}, num_context_tokens


def _choices() -> Iterator[tuple[str, Choice]]:
    yield "nothing", nothing
    for method, choices in METHODS.items():
        for period, choice in choices.items():
            yield f"{method}, 1/{period} per update", choice


def _sample(model: Any, token_ids: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Sampled tokens, and the logits that they were sampled from, over exact KV."""
    context, rows, new = Context(), list[torch.Tensor](), list[int]()
    row = context.compute(model, token_ids, 0)[-1]
    for _ in range(TURN_TOKENS):
        rows.append(row)
        new.append(int(torch.multinomial(row.softmax(0), 1)))
        row = context.compute(model, new[-1:], context.length)[-1]
    return torch.stack(rows), new


def _kl(logits: torch.Tensor, exact: torch.Tensor) -> list[float]:
    kept, other = logits.double().log_softmax(1), exact.double().log_softmax(1)
    found: list[float] = (kept.exp() * (kept - other)).sum(1).tolist()
    return found


def record_of(results: Sequence[tuple[Mapping[str, Measured], int]], num_updates: int) -> Record:
    num_tokens = sum(num for _, num in results)
    by_name = {name: [measured[name] for measured, _ in results] for name in results[0][0]}
    rows, raw = list[Row](), dict[str, Any]()
    for name, found in by_name.items():
        estimate = Estimate.of([each.kl for each in found])
        share = sum(each.num_computed_again for each in found) / num_tokens
        largest = max(value for each in found for value in each.kl)
        raw[name] = {"kl": estimate.mean, "error": estimate.error, "share": share}
        rows.append(
            Row(
                what=name,
                value=f"{share:.1%} of context tokens computed again, KL divergence "
                f"{estimate.mean:.1e} +- {estimate.error:.1e} nats per token, "
                f"at most {largest:.1e}",
            )
        )
    return Record(
        name="kv_refresh",
        claim="Computing the oldest part of a context's KV again in each update diverges less from "
        "exact KV than computing the whole context again every few updates, for as many tokens; "
        f"reference models and {num_updates} updates of the GRPO example.",
        rows=[*rows, *_comparisons(by_name)],
        raw=raw,
    )


def _comparisons(by_name: Mapping[str, Sequence[Measured]]) -> Iterator[Row]:
    for period in PERIODS:
        whole = by_name[f"whole context, 1/{period} per update"]
        for method in ("oldest part", "last part"):
            part = by_name[f"{method}, 1/{period} per update"]
            what = f"{method} / whole context, 1/{period} per update"
            yield _comparison(what, part, whole, has_goal=method == "oldest part")


def _comparison(
    what: str, part: Sequence[Measured], whole: Sequence[Measured], *, has_goal: bool
) -> Row:
    """Paired comparison: both methods have the same tokens in each conversation."""
    differences = [
        [a - b for a, b in zip(one.kl, other.kl, strict=True)]
        for one, other in zip(part, whole, strict=True)
    ]
    found = Estimate.of(differences)
    mean = Estimate.of([each.kl for each in whole]).mean
    is_smaller = found.mean < -2 * found.error
    return Row(
        what=what,
        value=f"KL divergence {1 + found.mean / mean:.2f} times as large, difference "
        f"{found.mean:+.1e} +- {found.error:.1e} nats per token",
        goal="below 0 by two standard errors" if has_goal else "",
        verdict=("met" if is_smaller else "missed") if has_goal else "",
    )


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        paths = checkpoints(options.updates, options.checkpoints or Path(folder))
        models = {
            version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for version, path in paths.items()
        }
        questions = Questions(AutoTokenizer.from_pretrained(SEEDLING), seed=2, num_held_out=1)
        drawn = [questions.draw(options.conversations) for _ in models]
        results = [
            run(models, number, [turn[number].token_ids for turn in drawn])
            for number in range(options.conversations)
        ]
    record = record_of(results, options.updates)
    record.write(options.out)
    record.show()


if __name__ == "__main__":
    main()
