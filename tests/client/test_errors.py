import pickle

import httpx
import pytest

import coppice
from coppice.errors import PROBLEM_CLASSES, ProblemError, error_of
from coppice.wire.problem_catalogue import PROBLEMS, Problem
from tests.client.app import App, refusing
from tests.client.conftest import Connect


def problem(code: str, **members: object) -> Problem:
    fields = {"type": f"/problems/{code}", "title": "No", "status": 418, "code": code, **members}
    return Problem.model_validate(fields)


def test_every_code_has_exactly_one_class() -> None:
    assert PROBLEM_CLASSES.keys() == PROBLEMS.keys()


def test_every_problem_class_is_used() -> None:
    family = {
        member
        for member in (getattr(coppice, name) for name in dir(coppice))
        if isinstance(member, type) and issubclass(member, ProblemError)
    }
    assert family - {ProblemError} == set(PROBLEM_CLASSES.values())


@pytest.mark.parametrize("code", PROBLEMS)
def test_problem_is_raised_as_its_class(connect: Connect, code: str) -> None:
    kind = PROBLEMS[code]
    client = connect(App(refusing(code, kind.status, detail="because")))
    with pytest.raises(PROBLEM_CLASSES[code]) as caught:
        client.resume()
    error = caught.value
    assert type(error) is PROBLEM_CLASSES[code]
    assert (error.code, error.status, error.detail) == (code, kind.status, "because")
    assert error.retryable == kind.retryable


@pytest.mark.parametrize("code", PROBLEMS)
def test_problem_instead_of_a_stream_is_raised_the_same(connect: Connect, code: str) -> None:
    client = connect(App(refusing(code, PROBLEMS[code].status)))
    with pytest.raises(PROBLEM_CLASSES[code]):
        client.rollout(["hello"])


def test_unknown_code_is_still_a_problem(connect: Connect) -> None:
    client = connect(App(refusing("tea_pot", 418)))
    with pytest.raises(ProblemError) as caught:
        client.status()
    assert type(caught.value) is ProblemError
    assert not caught.value.retryable


def test_problem_contains_retry_after(connect: Connect) -> None:
    client = connect(App(refusing("not_ready", 503, {"Retry-After": "9"}, retry_after_seconds=1.5)))
    with pytest.raises(coppice.EngineUnavailable) as caught:
        client.status()
    assert caught.value.retry_after == 1.5


def test_retry_after_header_is_the_fallback(connect: Connect) -> None:
    client = connect(App(refusing("not_ready", 503, {"Retry-After": "9"})))
    with pytest.raises(coppice.EngineUnavailable) as caught:
        client.status()
    assert caught.value.retry_after == 9.0


def test_error_page_of_a_proxy_is_a_bad_answer(connect: Connect) -> None:
    client = connect(App(lambda request: httpx.Response(502, html="<h1>Bad gateway</h1>")))
    with pytest.raises(coppice.BadAnswer, match=r"502 .*Bad gateway"):
        client.status()


def test_redirect_is_a_bad_answer(connect: Connect) -> None:
    client = connect(App(lambda request: httpx.Response(302, headers={"Location": "/login"})))
    with pytest.raises(coppice.BadAnswer, match="302"):
        client.status()


def test_malformed_problem_is_a_bad_answer(connect: Connect) -> None:
    headers = {"Content-Type": "application/problem+json"}
    client = connect(App(lambda request: httpx.Response(500, content=b"{}", headers=headers)))
    with pytest.raises(coppice.BadAnswer, match="invalid problem"):
        client.status()


def test_answer_of_another_shape_is_a_bad_answer(connect: Connect) -> None:
    client = connect(App(lambda request: httpx.Response(200, json={"hello": "there"})))
    with pytest.raises(coppice.BadAnswer, match="StatusAnswer"):
        client.status()


def test_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(error_of(problem("not_found", detail="gone"))))
    assert type(error) is coppice.NotFound
    assert error.detail == "gone"


def test_connection_failure_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(coppice.ConnectionFailed("refused", unsent=True)))
    assert (str(error), error.unsent) == ("refused", True)


@pytest.mark.parametrize(
    ("kind", "retryable"),
    [
        (coppice.ConnectionFailed, True),
        (coppice.TimedOut, True),
        (coppice.StreamBroken, True),
        (coppice.RolloutLost, False),
        (coppice.BadAnswer, False),
        (coppice.GatewayFailed, True),
    ],
)
def test_error_reports_whether_a_retry_may_help(
    kind: type[coppice.TransportError], retryable: bool
) -> None:
    assert kind("no").retryable is retryable
    assert not coppice.CoppiceError().retryable


def test_error_lists_every_invalid_field() -> None:
    errors = [{"path": "groups.0.n", "message": "too large"}]
    text = str(error_of(problem("invalid_request", detail="2 fields", errors=errors)))
    assert text.splitlines() == [
        "invalid_request (418): 2 fields",
        "  path: groups.0.n, message: too large",
    ]
