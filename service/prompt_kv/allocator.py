"""First-fit extent allocator for an arena: whole pages, adjacent free extents are merged."""

from bisect import insort
from dataclasses import dataclass

PAGE_BYTES = 4096
"""Page size: the granularity of mmap offsets, so that every slot can be mapped on its own."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Half-open byte range [start, end) of an arena."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class ExtentAllocator:
    """Free list over `capacity_bytes`. Every byte is either free or allocated, never both."""

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes % PAGE_BYTES == 0, "an arena is made of whole pages"
        self.capacity_bytes = capacity_bytes
        self._free = [Extent(0, capacity_bytes)] if capacity_bytes else []
        self._taken: set[Extent] = set()

    @property
    def free_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self._free)

    def allocate(self, num_bytes: int) -> Extent | None:
        """Allocate at least `num_bytes`, rounded up to whole pages.

        Returns None if no free extent is large enough. Because of fragmentation that can happen
        even if `free_bytes` is sufficient.
        """
        assert num_bytes > 0, "num_bytes must be positive"
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
        """Assert that the extents tile the capacity and that adjacent free extents are merged."""
        end = 0
        for extent in sorted([*self._free, *self._taken]):
            assert extent.start == end < extent.end, "extents overlap or leave a hole"
            end = extent.end
        assert end == self.capacity_bytes, "bytes are missing"
        pairs = zip(self._free, self._free[1:], strict=False)
        assert all(left.end < right.start for left, right in pairs), "two gaps touch"

    def _merge_with_next(self, index: int) -> None:
        """Merge the free extent at `index` with its successor if the two are adjacent."""
        if index < 0 or index + 1 >= len(self._free):
            return
        left, right = self._free[index : index + 2]
        if left.end == right.start:
            self._free[index : index + 2] = [Extent(left.start, right.end)]


def round_up_to_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
