"""Attention layers are timed separately from the step that runs them."""

from bench.harness.decode_timing import Steps, timed_layers


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Layer:
    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    def forward(self, query: str, *, output: str) -> str:
        self._clock.seconds += self._seconds
        return query + output


def test_time_of_the_layers_is_measured_and_other_work_is_not() -> None:
    clock, times = Clock(), [7.0]
    layers = [Layer(clock, 0.25), Layer(clock, 0.5)]
    with timed_layers(layers, clock, times):
        assert [layer.forward("a", output="b") for layer in layers] == ["ab", "ab"]
        clock.seconds += 1
    assert times == [7.0, 750.0]
    layers[0].forward("a", output="b")
    assert "forward" not in vars(layers[0]) and times == [7.0, 750.0]


def test_row_has_the_time_of_the_attention_layers_where_it_was_measured() -> None:
    steps = Steps(stock=[20.0] * 3, shared=[10.0] * 3, without=[8.0] * 3, grouped=[True] * 3)
    assert steps.row("case", None).value.endswith(
        "20.0 -> 10.0 ms per step; without attention 2.50x"
    )
    steps.stock_attention.append(11.5)
    steps.shared_attention.append(1.75)
    assert steps.row("case", None).value.endswith("; attention layers 11.5 -> 1.8 ms")
