"""Prompts over which the goals of the cross-context benchmark are evaluated, by hand."""

from bench.cross_context import PREDICT, Arm, Shape, shapes_of, splice_modes, time_rows
from bench.harness.prediction_threshold_sweep import FEWEST, Predictions, Tokens, prediction_rows
from bench.harness.record import Row
from coppice.wire.rollouts import PromptSpan


def arm(seconds: list[float], *, reused: int = 0, predicted: tuple[int, ...] = ()) -> Arm:
    return Arm(
        seconds=seconds,
        later=seconds[1:],
        reused=[reused] * len(seconds),
        computed=[100 - reused] * len(seconds),
        round_trips=[1] * len(seconds),
        predicted=list(predicted),
    )


def rows_of(mode: str, measured: Arm) -> list[Row]:
    whole = shapes_of(4, 1)[0]
    shape = Shape(
        num_own_tokens=120,
        rounds=1,
        modes={name: whole.modes[name] for name in ("prefilled", mode)},
    )
    return time_rows(shape, {"prefilled": arm([1.0] * 20), mode: measured}, 4)


def test_prediction_has_the_goals_of_splicing_over_all_prompts() -> None:
    [mode], few = PREDICT, arm([1.0] * 18 + [0.1] * 2, reused=20, predicted=(18, 19))
    for name in (mode, splice_modes(4)):
        verdicts = [row.verdict for row in rows_of(name, few) if row.goal]
        assert verdicts == ["missed", "missed", "missed"]


def test_selected_prompts_meet_no_goal() -> None:
    few = arm([1.0] * 18 + [0.1] * 2, reused=20, predicted=(18, 19))
    chosen = [row for row in rows_of("predicted", few) if "predicted prompts" in row.what]
    assert len(chosen) == 2 and chosen[0].value.startswith("10.00 ")
    assert all(not row.goal and not row.verdict for row in chosen)


def sweep_rows(values: list[float]) -> tuple[Row, Row]:
    of = Predictions(num_prompts=48, num_tokens=250, divergences={0.3: values}, reused={0.3: 0.25})
    all_prompts, predicted = prediction_rows([of])
    return all_prompts, predicted


def test_too_few_predicted_prompts_give_no_verdict() -> None:
    assert [sweep_rows([0.01] * num)[1].verdict for num in (0, 1, FEWEST - 1)] == ["", "", ""]
    assert [sweep_rows([value] * FEWEST)[1].verdict for value in (0.01, 0.1)] == ["met", "missed"]


def test_prefilled_prompts_count_as_zero_in_the_mean() -> None:
    [all_prompts, predicted] = sweep_rows([0.24] * 12)
    assert all_prompts.value.startswith("0.0600 nats") and "25 %" in all_prompts.value
    assert predicted.value.startswith("0.2400 nats") and "12 of 48" in predicted.value
    assert not all_prompts.goal


def test_new_spans_of_a_predicted_prompt_count_as_prefilled() -> None:
    parts = [
        PromptSpan(token_ids=[1] * 10),
        PromptSpan(token_ids=[2] * 20, cache_key="a"),
        PromptSpan(token_ids=[3] * 30, cache_key="b"),
        PromptSpan(token_ids=[4] * 5),
    ]
    tokens = Tokens()
    tokens.count(parts, predicted=False)
    assert (tokens.reused, tokens.computed) == (0, 65 + 50)
    tokens.count(
        [parts[0], PromptSpan(token_ids=[5] * 20, cache_key="a"), *parts[2:]], predicted=True
    )
    assert (tokens.reused, tokens.computed) == (60, 115 + 20 + 5)
