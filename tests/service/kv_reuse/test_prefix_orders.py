from coppice.wire.rollouts import PromptSpan
from service.kv_reuse.prompt_sections import MAX_ORDERS, PrefixOrders, Scope

SCOPE = Scope("key", None)


def parts(*names: str, own: int = 3) -> list[PromptSpan]:
    """Each text is its name; the unnamed text comes first, as callers write it."""
    named = [PromptSpan(token_ids=[ord(n)] * (10 + i), cache_key=n) for i, n in enumerate(names)]
    return [PromptSpan(token_ids=[0] * own), *named]


def in_order(orders: PrefixOrders, given: list[PromptSpan]) -> str:
    suggested = orders.suggest(SCOPE, given)
    assert sorted(suggested) == list(range(len(given)))
    orders.remember(SCOPE, [given[i] for i in suggested])
    return "".join(given[i].cache_key or "." for i in suggested)


def test_named_spans_come_first_in_the_known_order() -> None:
    orders = PrefixOrders(lambda: 0)
    assert in_order(orders, parts("q", "b", "c")) == "qbc."
    assert in_order(orders, [*parts("c", "q"), *parts("b")[1:]])[0] in "cq"


def test_longest_known_prefix_is_followed() -> None:
    orders = PrefixOrders(lambda: 0)
    a, b, c = (PromptSpan(token_ids=[i] * 8, cache_key=str(i)) for i in range(3))
    own = PromptSpan(token_ids=[9])
    orders.remember(SCOPE, [a, c, own])
    orders.remember(SCOPE, [b, a, c])
    orders.remember(SCOPE, [own, c])
    assert orders.suggest(SCOPE, [own, c, a]) == [2, 1, 0]
    assert orders.suggest(SCOPE, [own, c, a, b]) == [3, 2, 1, 0]
    assert orders.suggest(SCOPE, [c, own]) == [0, 1]


def test_repeated_span_is_used_twice() -> None:
    orders = PrefixOrders(lambda: 0)
    a = PromptSpan(token_ids=[1], cache_key="a")
    b = PromptSpan(token_ids=[2], cache_key="b")
    orders.remember(SCOPE, [a, b, a])
    assert orders.suggest(SCOPE, [b, a, a]) == [1, 0, 2]


def test_orders_of_other_owners_or_earlier_weights_are_unknown() -> None:
    epoch = [0]
    orders = PrefixOrders(lambda: epoch[0])
    a, b = PromptSpan(token_ids=[1], cache_key="a"), PromptSpan(token_ids=[2], cache_key="b")
    orders.remember(SCOPE, [b, a])
    assert orders.suggest(SCOPE, [a, b]) == [1, 0]
    assert orders.suggest(Scope("other", None), [a, b]) == [0, 1]
    assert orders.suggest(Scope("key", "salt"), [a, b]) == [0, 1]
    epoch[0] = 1
    assert orders.suggest(SCOPE, [a, b]) == [0, 1]


def test_known_orders_are_bounded() -> None:
    orders = PrefixOrders(lambda: 0)
    first, *_ = many = [
        [PromptSpan(token_ids=[i], cache_key="x"), PromptSpan(token_ids=[0], cache_key="a")]
        for i in range(1, MAX_ORDERS + 2)
    ]
    for order in many:
        orders.remember(SCOPE, order)
    assert orders.suggest(SCOPE, first[::-1]) == [0, 1]
    assert orders.suggest(SCOPE, many[-1][::-1]) == [1, 0]
