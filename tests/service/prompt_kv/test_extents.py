"""The allocator against a model that tracks every page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from service.prompt_kv.arena import PAGE_BYTES, Extent, ExtentAllocator

NUM_PAGES = 24


class Pages(RuleBasedStateMachine):
    """The model: the set of allocated pages."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.extents = ExtentAllocator(NUM_PAGES * PAGE_BYTES)
        self.pages: set[int] = set()

    @rule(target=taken, num_bytes=st.integers(1, (NUM_PAGES + 1) * PAGE_BYTES))
    def allocate(self, num_bytes: int) -> Extent | None:
        num_pages = -(-num_bytes // PAGE_BYTES)
        extent = self.extents.allocate(num_bytes)
        fits = any(
            self.pages.isdisjoint(range(start, start + num_pages))
            for start in range(NUM_PAGES - num_pages + 1)
        )
        assert (extent is not None) == fits
        if extent is not None:
            assert extent.num_bytes == num_pages * PAGE_BYTES
            mine = pages_of(extent)
            assert self.pages.isdisjoint(mine)
            self.pages |= mine
        return extent

    @rule(extent=consumes(taken))
    def release(self, extent: Extent | None) -> None:
        if extent is not None:
            self.extents.release(extent)
            self.pages -= pages_of(extent)

    @invariant()
    def the_books_balance(self) -> None:
        self.extents.check()
        assert self.extents.free_bytes == (NUM_PAGES - len(self.pages)) * PAGE_BYTES


def pages_of(extent: Extent) -> set[int]:
    return set(range(extent.start // PAGE_BYTES, extent.end // PAGE_BYTES))


Pages.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestPages = Pages.TestCase


def test_double_free_is_detected() -> None:
    extents = ExtentAllocator(4 * PAGE_BYTES)
    extent = extents.allocate(1)
    assert extent is not None
    extents.release(extent)
    with pytest.raises(AssertionError, match="not allocated"):
        extents.release(extent)


def test_empty_arena_has_no_room() -> None:
    extents = ExtentAllocator(0)
    assert extents.allocate(1) is None
    extents.check()
