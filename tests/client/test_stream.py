import json

import pytest

from coppice import BadAnswer, EndRecord, StartRecord, StreamBroken
from tests.client.answers import LINES, RECORDS
from tests.client.app import App, Body, streaming
from tests.client.conftest import Connect

WHOLE = b"".join(LINES)
BORDERS = [len(b"".join(LINES[:count])) for count in range(len(LINES))]
INSIDES = [border + len(line) // 2 for border, line in zip(BORDERS, LINES, strict=True)]


def test_stream_yields_its_records_in_order(connect: Connect) -> None:
    body = Body(LINES)
    assert list(connect(App(streaming(body))).stream(["hello"])) == RECORDS
    assert body.closed


def test_stream_requests_ndjson(connect: Connect) -> None:
    app = App(streaming(Body(LINES)))
    list(connect(app).stream(["hello"], n=2))
    assert app.request.headers["Accept"] == "application/x-ndjson"
    assert json.loads(app.request.content)["stream"] is True


@pytest.mark.parametrize("length", [*BORDERS, *INSIDES, len(WHOLE) - 1])
def test_cut_stream_yields_its_records_and_then_breaks(connect: Connect, length: int) -> None:
    body = Body([WHOLE[:length]])
    came = []
    with pytest.raises(StreamBroken):
        for record in connect(App(streaming(body))).stream(["hello"]):
            came.append(record)
    assert came == RECORDS[: WHOLE[:length].count(b"\n")]
    assert body.closed


@pytest.mark.parametrize("length", [*BORDERS, *INSIDES, len(WHOLE) - 1])
def test_rollout_over_a_cut_stream_breaks(connect: Connect, length: int) -> None:
    with pytest.raises(StreamBroken):
        connect(App(streaming(Body([WHOLE[:length]])))).rollout(["hello"])


def test_closing_early_closes_the_connection(connect: Connect) -> None:
    body = Body(LINES)
    records = connect(App(streaming(body))).stream(["hello"])
    assert next(records) == StartRecord(id="r1")
    assert not body.closed
    records.close()
    assert body.closed


def test_leaving_the_loop_closes_the_connection(connect: Connect) -> None:
    body = Body(LINES)
    for _ in connect(App(streaming(body))).stream(["hello"]):
        break
    assert body.closed


def test_nothing_is_sent_before_the_first_iteration(connect: Connect) -> None:
    app = App(streaming(Body(LINES)))
    connect(app).stream(["hello"]).close()
    assert not app.requests


def test_wrong_argument_is_reported_before_the_first_iteration(connect: Connect) -> None:
    with pytest.raises(TypeError, match="max_token"):
        connect(App()).stream(["hello"], max_token=5)  # type: ignore[call-arg]


def test_data_after_the_last_record_is_ignored(connect: Connect) -> None:
    body = Body([*LINES, LINES[0]])
    records = list(connect(App(streaming(body))).stream(["hello"]))
    assert isinstance(records[-1], EndRecord)
    assert len(records) == len(RECORDS)


def test_invalid_line_is_a_bad_answer(connect: Connect) -> None:
    body = Body([LINES[0], b"<html>\n", *LINES[1:]])
    with pytest.raises(BadAnswer):
        list(connect(App(streaming(body))).stream(["hello"]))
    assert body.closed
