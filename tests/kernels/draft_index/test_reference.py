"""Drafts on texts small enough to be checked by hand."""

from kernels.draft_index.store_protocol import Scope
from tests.kernels.draft_index.reference import ReferenceStore
from tests.kernels.draft_index.stores import array, draft, run_step

MAX_BYTES = 2**20
PROMPT = array([1, 2, 3])


def test_request_is_drafted_its_own_earlier_continuation() -> None:
    store = ReferenceStore(max_bytes=MAX_BYTES)
    slot = store.begin(b"g", PROMPT)
    drafted = run_step(store, {slot: [7, 8, 9, 7, 8]}, limit=5)
    assert draft(drafted) == [9, 7, 8, 9, 7]
    assert drafted.scope[0, :5].tolist() == [Scope.SELF] * 5
    assert drafted.match_length[0, 0] == 2


def test_sibling_ahead_of_the_request_is_followed() -> None:
    store = ReferenceStore(max_bytes=MAX_BYTES)
    ahead, behind = store.begin(b"g", PROMPT), store.begin(b"g", PROMPT)
    drafted = run_step(store, {ahead: [5, 6, 7, 8], behind: []})
    assert draft(drafted, 1) == [5, 6, 7, 8]
    assert drafted.scope[1, 0] == Scope.SIBLINGS


def test_earlier_response_to_the_prompt_is_found_again() -> None:
    store = ReferenceStore(max_bytes=MAX_BYTES)
    first = store.begin(b"epoch 1", PROMPT)
    run_step(store, {first: [5, 6, 7]})
    store.end(first, keep=True)
    drafted = run_step(store, {store.begin(b"epoch 2", PROMPT): []})
    assert draft(drafted) == [5, 6, 7]
    assert drafted.scope[0, 0] == Scope.PROMPT
