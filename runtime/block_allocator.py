"""Which KV blocks are free."""

from collections import deque
from collections.abc import Iterable

from ..kernels import FIRST_BLOCK


class BlockAllocator:
    """Hands out block numbers from `FIRST_BLOCK` to `num_blocks - 1`, each to one owner at a time."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Every block is free, whoever had it."""
        self._free = deque(range(FIRST_BLOCK, self._num_blocks))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks; the caller has checked that they are there."""
        assert num_blocks <= self.num_free, "more blocks were asked for than are free"
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        self._owned.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            assert block in self._owned, "a block was freed that nobody owns"
            self._owned.remove(block)
            self._free.append(block)
