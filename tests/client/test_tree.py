"""Trees in the client: streamed, packed, or grown externally."""

import json

import httpx
import numpy as np
import pytest

from coppice import Branching, InvalidRequest, Retry, TreeClosed
from coppice.errors import BadAnswer
from coppice.operations.record_stream import Collector
from coppice.rollout_results import result_of, result_of_packed, tree_of
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.packed.results import (
    EndRecord,
    GroupRecord,
    KvRecord,
    Record,
    SegmentRecord,
    StartRecord,
    pack,
    unpack,
)
from coppice.wire.prompt_kv import KvHandle
from coppice.wire.rollouts import (
    BranchAnswer,
    DropAnswer,
    GroupAnswer,
    GroupHead,
    RolloutAnswer,
    SegmentAnswer,
)
from tests.client.answers import USAGE
from tests.client.app import App, Body, answering, refusing, streaming
from tests.client.conftest import Connect
from tests.client.trees import LEAVES, segment, tree


def wire(name: str, parent: str | None, tokens: list[int], version: str = "v1") -> SegmentAnswer:
    return SegmentAnswer(
        id=name,
        parent=parent,
        depth=0 if parent is None else 1,
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        entropy=[0.25] * len(tokens),
        finish_reason="cut" if parent is None else "stop",
        versions=[VersionSpan(version=version, start=0, end=len(tokens))],
    )


SEGMENTS = [
    wire("0.0", None, [1, 2]),
    wire("0.1", "0.0", [3], "v1"),
    wire("0.2", "0.0", [4, 5], "v2"),
]
KV = KvHandle(handle="h", version="v1", num_tokens=5, num_bytes=99, lease_seconds=60, locators=[])
HEAD = GroupHead(
    id="g0",
    index=0,
    outcome="done",
    num_prompt_tokens=4,
    num_cached_tokens=0,
    leaves=["0.1", "0.2"],
    num_dropped=1,
)


def test_rows_are_the_paths_of_the_leaves() -> None:
    rows = tree().rows()
    assert [len(row.token_ids) for row in rows] == [10, 6, 7, 7, 9]
    first = tree().path("a1")
    assert rows[0].token_ids.tolist() == [t for s in first for t in s.token_ids.tolist()]
    assert rows[0].versions == (VersionSpan(version="v0", start=0, end=10),)
    assert len(rows[0].token_versions()) == 10


def test_tree_can_be_traversed() -> None:
    grown = tree()
    assert [s.id for s in grown.children("b")] == ["b1", "b2", "b3"]
    assert [s.id for s in grown.children(None)] == ["a", "b"]
    assert [s.num_leaves for s in grown.segments] == [2, 3, 1, 1, 1, 1, 1]
    assert grown.num_tokens == 27
    with pytest.raises(KeyError):
        grown.segment("c")


def test_segments_without_leaves_are_dropped_and_gaps_reported() -> None:
    segments = [segment("a", None, 1, 2), segment("b", None, 1, 2)]
    assert [s.id for s in tree_of(segments, ["b"]).segments] == ["b"]
    with pytest.raises(ValueError, match="has no segment c"):
        tree_of(segments, ["c"])


def test_stream_becomes_a_tree_without_dropped_segments() -> None:
    collector = Collector()
    records: list[Record] = [
        StartRecord(id="r"),
        *(SegmentRecord(group=0, segment=each) for each in SEGMENTS),
        SegmentRecord(group=0, segment=wire("0.3", "0.0", [9])),
        KvRecord(group=0, kv=KV),
        KvRecord(group=0, segment="0.0", kv=KV),
        KvRecord(group=0, segment="0.1", kv_reason="not_continued"),
        GroupRecord(group=HEAD),
        EndRecord(outcome="done", usage=USAGE),
    ]
    for record in records:
        collector.add(record)
    [group] = collector.result().groups
    assert group.tree is not None and group.samples == ()
    assert [(s.id, s.num_leaves) for s in group.tree.segments] == [
        *[("0.0", 2), ("0.1", 1), ("0.2", 1)]
    ]
    assert [(s.kv, s.kv_reason) for s in group.tree.segments] == [
        *[(KV, None), (None, "not_continued"), (None, None)]
    ]
    assert group.num_dropped == 1
    assert [span.version for span in group.tree.rows()[1].versions] == ["v1", "v2"]


def test_segments_without_their_group_are_a_bad_answer() -> None:
    collector = Collector()
    collector.add(StartRecord(id="r"))
    collector.add(SegmentRecord(group=0, segment=SEGMENTS[0]))
    collector.add(EndRecord(outcome="done", usage=USAGE))
    with pytest.raises(BadAnswer):
        collector.result()


@pytest.mark.parametrize("is_packed", [False, True])
def test_context_of_a_session_has_no_logprobs_and_is_not_counted(is_packed: bool) -> None:
    context = SegmentAnswer(
        id="0.1",
        parent="0.0",
        depth=1,
        token_ids=[7, 8],
        logprobs=[],
        finish_reason="cut",
        versions=[],
        sampled=False,
    )
    assert context.model_dump()["sampled"] is False
    assert "sampled" not in SEGMENTS[0].model_dump()
    last = SEGMENTS[1].model_copy(update={"id": "0.2", "parent": "0.1", "entropy": None})
    head = HEAD.model_copy(update={"leaves": ["0.2"]})
    segments = [SEGMENTS[0], context, last]
    group = GroupAnswer(**head.model_dump(), samples=[], segments=segments)
    answer = RolloutAnswer(id="r", outcome="done", groups=[group], usage=USAGE)
    result = result_of_packed(unpack(pack(answer))) if is_packed else result_of(answer)
    tree = result.groups[0].tree
    assert tree is not None
    num_sampled = len(SEGMENTS[0].token_ids) + len(last.token_ids)
    assert (group.num_generated_tokens, tree.num_tokens) == (num_sampled, num_sampled)
    assert [segment.sampled for segment in tree.segments] == [True, False, True]
    assert [len(segment.logprobs) for segment in tree.segments] == [
        len(each.logprobs) for each in segments
    ]
    (row,) = tree.rows()
    assert row.token_ids.tolist() == [token for each in segments for token in each.token_ids]
    is_context = [not each.sampled for each in segments for _ in each.token_ids]
    assert np.isnan(row.logprobs).tolist() == is_context


def test_tree_is_requested_like_any_rollout(connect: Connect) -> None:
    group = GroupAnswer(**HEAD.model_dump(), samples=[], segments=SEGMENTS)
    answer = RolloutAnswer(id="r", outcome="done", groups=[group], usage=USAGE)
    app = App(answering(answer))
    client = connect(app)
    pending = client.submit([[1, 2, 3, 4]], branching=Branching(mode="interval", interval=64))
    assert json.loads(app.request.content)["branching"]["interval"] == 64
    assert pending.id == "r"


def test_branch_sends_a_key_and_returns_segments(connect: Connect) -> None:
    app = App(answering(BranchAnswer(segments=SEGMENTS[1:], lease_seconds=60)))
    client = connect(app, retry=Retry())
    grown = client.branch("r/1", "0.0", n=2, max_tokens=64)
    assert app.request.url.raw_path == b"/v1/rollouts/r%2F1/branch"
    assert json.loads(app.request.content) == {
        "segment": "0.0",
        "group": 0,
        "n": 2,
        "max_tokens": 64,
    }
    assert "idempotency-key" in app.request.headers
    assert [(s.id, s.parent, s.token_ids.tolist()) for s in grown] == [
        *[("0.1", "0.0", [3]), ("0.2", "0.0", [4, 5])]
    ]


def test_drop_returns_the_removed_segments(connect: Connect) -> None:
    app = App(answering(DropAnswer(dropped=["0.1", "0.2"], lease_seconds=60)))
    assert connect(app).drop_segment("r", "0.1") == ("0.1", "0.2")
    request: httpx.Request = app.request
    assert (request.method, request.url.path) == ("DELETE", "/v1/rollouts/r/segments/0.1")


def test_closed_tree_has_its_own_exception(connect: Connect) -> None:
    with pytest.raises(TreeClosed):
        connect(App(refusing("tree_closed", 409))).branch("r")
    with pytest.raises(InvalidRequest):
        connect(App(refusing("invalid_request", 422))).branch("r")


def test_leaves_are_in_the_order_of_their_rows() -> None:
    assert tree().leaves == LEAVES


def test_progress_counts_leaves(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[Record] = [
        StartRecord(id="r"),
        *(SegmentRecord(group=0, segment=each) for each in SEGMENTS),
        GroupRecord(group=HEAD),
        EndRecord(outcome="done", usage=USAGE),
    ]
    lines = [record.model_dump_json().encode() + b"\n" for record in records]
    branching = Branching(mode="interval", max_leaves=2)
    connect(App(streaming(Body(lines)))).rollout([[1]], branching=branching, progress=True)
    assert "2/2" in capsys.readouterr().err
