"""Blocks go out and come back, each to one owner at a time."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ostinato.kernels import FIRST_BLOCK, SINK_BLOCK
from ostinato.runtime.block_allocator import BlockAllocator


class Allocation(RuleBasedStateMachine):
    """An allocator beside a list of who owns what."""

    @initialize(num_usable=st.integers(0, 20))
    def make(self, num_usable: int) -> None:
        self.num_usable = num_usable
        self.allocator = BlockAllocator(num_usable + FIRST_BLOCK)
        self.owners: list[list[int]] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_blocks = data.draw(st.integers(0, self.allocator.num_free))
        blocks = self.allocator.allocate(num_blocks)
        assert len(blocks) == num_blocks
        self.owners.append(blocks)

    @rule(excess=st.integers(1, 5))
    def allocate_too_many(self, excess: int) -> None:
        with pytest.raises(AssertionError, match="more blocks"):
            self.allocator.allocate(self.allocator.num_free + excess)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.owners:
            self.allocator.free(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @rule(data=st.data())
    def free_what_nobody_owns(self, data: st.DataObject) -> None:
        owned = {block for blocks in self.owners for block in blocks}
        stranger = data.draw(st.integers(-1, self.num_usable + FIRST_BLOCK).filter(lambda block: block not in owned))
        with pytest.raises(AssertionError, match="nobody owns"):
            self.allocator.free([stranger])

    @invariant()
    def each_block_has_one_place(self) -> None:
        owned = [block for blocks in self.owners for block in blocks]
        assert len(owned) == len(set(owned))
        assert set(owned).isdisjoint({0, SINK_BLOCK})
        assert all(FIRST_BLOCK <= block < FIRST_BLOCK + self.num_usable for block in owned)
        assert self.allocator.num_free == self.num_usable - len(owned)

    def teardown(self) -> None:
        """B32: all blocks come back, and every one of them can be had again."""
        for blocks in getattr(self, "owners", []):
            self.allocator.free(blocks)
        if hasattr(self, "allocator"):
            assert self.allocator.num_free == self.num_usable
            again = self.allocator.allocate(self.num_usable)
            assert sorted(again) == list(range(FIRST_BLOCK, FIRST_BLOCK + self.num_usable))


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


def test_a_block_freed_twice_is_caught() -> None:
    allocator = BlockAllocator(FIRST_BLOCK + 3)
    blocks = allocator.allocate(2)
    with pytest.raises(AssertionError, match="nobody owns"):
        allocator.free([blocks[0], blocks[0]])


@pytest.mark.parametrize("num_blocks", [0, 1, FIRST_BLOCK])
def test_the_reserved_blocks_are_never_handed_out(num_blocks: int) -> None:
    allocator = BlockAllocator(num_blocks)
    assert allocator.num_free == 0
    assert allocator.allocate(0) == []
