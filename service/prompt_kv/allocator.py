"""Which bytes of an arena are taken. First fit, whole pages, neighbours joined when given back."""

from bisect import insort
from dataclasses import dataclass

PAGE_BYTES = 4096
"""What can be mapped by itself."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Bytes start..end, end excluded."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class ExtentAllocator:
    """Every byte is free or taken, and nothing is both."""

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes % PAGE_BYTES == 0, "an arena is made of whole pages"
        self.capacity_bytes = capacity_bytes
        self._free = [Extent(0, capacity_bytes)] if capacity_bytes else []
        self._taken: set[Extent] = set()

    @property
    def free_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self._free)

    def allocate(self, num_bytes: int) -> Extent | None:
        """None if no gap is large enough; the free bytes may still be that many."""
        assert num_bytes > 0, "nothing needs no room"
        wanted = round_up_to_pages(num_bytes)
        for index, gap in enumerate(self._free):
            if gap.num_bytes >= wanted:
                taken = Extent(gap.start, gap.start + wanted)
                rest = [Extent(taken.end, gap.end)] if gap.end > taken.end else []
                self._free[index : index + 1] = rest
                self._taken.add(taken)
                return taken
        return None

    def release(self, extent: Extent) -> None:
        assert extent in self._taken, "given back twice, or never taken"
        self._taken.remove(extent)
        insort(self._free, extent)
        at = self._free.index(extent)
        self._merge_with_next(at)
        self._merge_with_next(at - 1)

    def check(self) -> None:
        """The extents tile the capacity, and no two gaps touch."""
        end = 0
        for extent in sorted([*self._free, *self._taken]):
            assert extent.start == end < extent.end, "extents overlap or leave a hole"
            end = extent.end
        assert end == self.capacity_bytes, "bytes are missing"
        pairs = zip(self._free, self._free[1:], strict=False)
        assert all(left.end < right.start for left, right in pairs), "two gaps touch"

    def _merge_with_next(self, index: int) -> None:
        """The gap with the one after it, where there are two that touch."""
        if index < 0 or index + 1 >= len(self._free):
            return
        left, right = self._free[index : index + 2]
        if left.end == right.start:
            self._free[index : index + 2] = [Extent(left.start, right.end)]


def round_up_to_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
