"""Subclass of vLLM's queue of free KV blocks: retained blocks are evicted last.

Retained blocks have no reference: they count as free, as all cached blocks of finished requests do.
So an allocation succeeds exactly if it would succeed without retention, no request is preempted
because of it, and a reset of the prefix cache does not find blocks in use.
"""

from collections.abc import Callable, Iterable, Sequence

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class RetainingBlockQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """Queue of free blocks that takes over the blocks of another one, which is not used again.

    Free retained blocks are counted, but are not in the linked list. A retained block that requests
    use is put beside the list when it is freed. If the list is too short for an allocation,
    `on_shortage` receives the number of missing blocks, and must release as many free blocks, or
    all of them. `num_reused` counts the retained blocks that requests found in the prefix cache.
    """

    def __init__(self, queue: FreeKVCacheBlockQueue, *, on_shortage: Callable[[int], None]) -> None:
        self.num_free_blocks = queue.num_free_blocks
        self.fake_free_list_head = queue.fake_free_list_head
        self.fake_free_list_tail = queue.fake_free_list_tail
        self._on_shortage = on_shortage
        self._retained: set[int] = set()
        self._beside: dict[int, KVCacheBlock] = {}
        self.num_reused = 0

    @property
    def num_retained_blocks(self) -> int:
        """Number of retained blocks that no request uses."""
        return len(self._beside)

    def retain(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Evict these blocks last, from now on or from when they are freed."""
        for block in blocks:
            if block.block_id in self._retained:
                continue
            self._retained.add(block.block_id)
            if block.ref_cnt == 0:
                super().remove(block)
                self._put_beside(block)

    def release(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Evict these blocks like all others, the first one of them first.

        Returns the number of them that are free.
        """
        self._retained.difference_update(block.block_id for block in blocks)
        free = [block for block in blocks if self._beside.pop(block.block_id, None) is not None]
        self.num_free_blocks -= len(free)
        super().append_n(free)
        return len(free)

    def release_everything(self) -> None:
        """Evict all blocks like all others."""
        free = list(self._beside.values())
        self._retained.clear()
        self._beside.clear()
        self.num_free_blocks -= len(free)
        super().append_n(free)

    def _put_beside(self, block: KVCacheBlock) -> None:
        self._beside[block.block_id] = block
        self.num_free_blocks += 1

    def _lengthen(self, num_blocks: int) -> None:
        """Ensure that the linked list has as many blocks, if as many are free."""
        missing = num_blocks - (self.num_free_blocks - len(self._beside))
        if missing > 0 and self._beside:
            self._on_shortage(missing)

    # Methods that the block pool calls

    def popleft(self) -> KVCacheBlock:
        self._lengthen(1)
        return super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        self._lengthen(n)
        blocks: list[KVCacheBlock] = super().popleft_n(n)
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        if self._beside.pop(block.block_id, None) is None:
            super().remove(block)
        else:
            self.num_free_blocks -= 1
            self.num_reused += 1

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if self._retained:
            for block in blocks:
                if block.block_id in self._retained:
                    self._put_beside(block)
            blocks = [block for block in blocks if block.block_id not in self._retained]
        super().append_n(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks without a hash first, also those that had one when they were retained."""
        self._retained.difference_update(block.block_id for block in blocks)
        super().prepend_n(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [*super().get_all_free_blocks(), *self._beside.values()]
