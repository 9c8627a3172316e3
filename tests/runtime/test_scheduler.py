"""Who is computed next: a scheduler driven without a model, through random lives of random requests."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kernels import FIRST_BLOCK
from ostinato.runtime import SamplingParams, Sequence
from ostinato.runtime.block_allocator import BlockAllocator
from ostinato.runtime.scheduler import DecodeBatch, PrefillBatch, PrefillChunk, RowMove, Scheduler
from ostinato.runtime.text_stream import TextStream

BLOCK_SIZE = 16


def sequence(num_prompt: int, max_tokens: int) -> Sequence:
    stream = TextStream(None)
    return Sequence(list(range(num_prompt)), SamplingParams(), 0, 0, frozenset(), max_tokens, stream)


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@dataclass
class Simulation:
    """Does to a scheduler what an engine does, with the rows of a device as a list of sequences."""

    num_usable: int
    max_num_seqs: int
    budget: int
    rows: list[Sequence | None] = field(init=False)
    started: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = BlockAllocator(self.num_usable + FIRST_BLOCK)
        self.scheduler = Scheduler(
            self.allocator, block_size=BLOCK_SIZE, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.budget
        )
        self.rows = [None] * self.max_num_seqs

    def step(self) -> list[Sequence]:
        """Runs the next batch; returns the sequences that got a token."""
        batch = self.scheduler.schedule()
        if isinstance(batch, DecodeBatch):
            assert not self.scheduler.prefilling, "prompts come first"
            assert batch.sequences == self.rows[: len(batch.sequences)]
            assert all(row is None for row in self.rows[len(batch.sequences) :])
            for one in batch.sequences:
                one.num_computed += 1
            return batch.sequences
        return self._prefill(batch)

    def _prefill(self, batch: PrefillBatch) -> list[Sequence]:
        assert batch.chunks
        assert sum(chunk.stop - chunk.start for chunk in batch.chunks) <= self.budget
        assert len({id(chunk.sequence) for chunk in batch.chunks}) == len(batch.chunks)
        assert all(chunk.is_last for chunk in batch.chunks[:-1]), "a later prompt waits for an earlier one"
        for chunk in batch.chunks:
            one = chunk.sequence
            assert chunk.start == one.num_computed < chunk.stop <= len(one.prompt_ids)
            assert len(one.blocks) >= blocks_for(one.max_len)
            if chunk.start == 0:
                self.started.append(one)
            one.num_computed = chunk.stop
            if chunk.is_last:
                assert one.row is not None
                assert self.rows[one.row] is None, "a new row is a free one"
                self.rows[one.row] = one
        return [chunk.sequence for chunk in batch.chunks if chunk.is_last]

    def retire(self, one: Sequence) -> None:
        move = self.scheduler.retire(one)
        if move is not None:
            assert self.rows[move.target] is one
            self.rows[move.target] = self.rows[move.source]
            self.rows[move.source] = None
        assert one not in self.rows
        self.scheduler.release(one)

    def check(self) -> None:
        running = self.scheduler.running
        assert self.rows == [*running, *[None] * (self.max_num_seqs - len(running))], "rows have no gaps"
        assert [one.row for one in running] == list(range(len(running)))
        owned = [block for one in (*running, *self.scheduler.prefilling) for block in one.blocks]
        assert len(owned) == len(set(owned)) == self.num_usable - self.allocator.num_free
        assert len(running) + len(self.scheduler.prefilling) <= self.max_num_seqs


@dataclass(frozen=True)
class Life:
    """A request: when it comes, and its end, after `num_tokens` tokens or aborted in step `abort_after` of its life."""

    num_prompt: int
    max_tokens: int
    arrives: int
    num_tokens: int
    abort_after: int | None


@st.composite
def lives(draw: st.DrawFn, longest: int) -> Life:
    near_border = st.sampled_from([15, 16, 17, 31, 32, 33]).filter(lambda n: n < longest)
    num_prompt = draw(st.integers(1, longest - 1) | near_border)
    max_tokens = draw(st.integers(1, min(12, longest - num_prompt)))
    abort_after = draw(st.none() | st.integers(0, 8))
    return Life(num_prompt, max_tokens, draw(st.integers(0, 12)), draw(st.integers(1, max_tokens)), abort_after)


@settings(deadline=None, derandomize=True)
@given(st.data(), st.integers(3, 12), st.integers(1, 5), st.sampled_from([1, 7, 16, 40, 500]))
def test_every_request_is_served_in_turn_whatever_the_others_do(
    data: st.DataObject, num_usable: int, max_num_seqs: int, budget: int
) -> None:
    """B32, B33: rows stay without gaps, the budget holds, nobody is overtaken, and all comes to an end."""
    simulation = Simulation(num_usable, max_num_seqs, budget)
    requests = data.draw(st.lists(lives(num_usable * BLOCK_SIZE), min_size=1, max_size=14))
    coming = sorted(
        ((life, sequence(life.num_prompt, life.max_tokens)) for life in requests), key=lambda c: c[0].arrives
    )
    life_of = {id(one): life for life, one in coming}
    age: dict[int, int] = {}
    num_tokens: dict[int, int] = {}
    arrived: list[Sequence] = []
    # A step completes a prompt, or uses up the budget, or gives every running sequence a token.
    bound = sum(1 + life.num_prompt // budget + life.max_tokens for life in requests) + 13
    for now in range(bound + 1):
        while coming and coming[0][0].arrives <= now:
            _, one = coming.pop(0)
            simulation.scheduler.add(one)
            arrived.append(one)
            age[id(one)] = num_tokens[id(one)] = 0
        if not simulation.scheduler.has_work:
            if not coming:
                break
            continue
        got = simulation.step()
        for one in got:
            num_tokens[id(one)] += 1
            if num_tokens[id(one)] == life_of[id(one)].num_tokens:
                simulation.retire(one)
                del age[id(one)]
        for one in arrived:
            if age.get(id(one)) == life_of[id(one)].abort_after and id(one) in age:
                simulation.retire(one)
                del age[id(one)]
        for key in age:
            age[key] += 1
        simulation.check()
    assert not coming
    assert not simulation.scheduler.has_work, "not stuck"
    assert simulation.allocator.num_free == num_usable
    assert simulation.started == [one for one in arrived if one in simulation.started], "first come, first served"


@pytest.fixture
def simulate() -> Callable[..., Simulation]:
    def make(*requests: Sequence, num_usable: int = 100, max_num_seqs: int = 8, budget: int = 1000) -> Simulation:
        simulation = Simulation(num_usable, max_num_seqs, budget)
        for one in requests:
            simulation.scheduler.add(one)
        return simulation

    return make


def test_prompts_share_a_step_until_the_budget_is_used(simulate: Callable[..., Simulation]) -> None:
    a, b, c = sequence(10, 2), sequence(30, 2), sequence(5, 2)
    simulation = simulate(a, b, c, budget=25)
    assert simulation.scheduler.schedule() == PrefillBatch([PrefillChunk(a, 0, 10), PrefillChunk(b, 0, 15)])
    b.num_computed = 15
    assert simulation.scheduler.schedule() == PrefillBatch([PrefillChunk(b, 15, 30), PrefillChunk(c, 0, 5)])
    assert [a.row, b.row, c.row] == [0, 1, 2]


def test_a_large_request_is_not_overtaken_by_small_ones(simulate: Callable[..., Simulation]) -> None:
    first, large, small = sequence(16, 16), sequence(116, 12), sequence(3, 1)
    simulation = simulate(first, large, small, num_usable=8)
    assert simulation.step() == [first]
    assert simulation.step() == [first]
    assert list(simulation.scheduler.waiting) == [large, small]
    simulation.retire(first)
    assert simulation.step() == [large]
    assert list(simulation.scheduler.waiting) == [small]


def test_a_late_prompt_goes_before_the_next_decode_step(simulate: Callable[..., Simulation]) -> None:
    first, late = sequence(4, 9), sequence(4, 9)
    simulation = simulate(first)
    assert simulation.step() == [first]
    simulation.scheduler.add(late)
    assert simulation.step() == [late]
    assert simulation.step() == [first, late]


def test_retiring_moves_the_last_row_into_the_gap(simulate: Callable[..., Simulation]) -> None:
    a, b, c = (sequence(4, 9) for _ in range(3))
    simulation = simulate(a, b, c)
    simulation.step()
    assert simulation.scheduler.retire(a) == RowMove(source=2, target=0)
    assert [a.row, b.row, c.row] == [None, 1, 0]
    assert simulation.scheduler.retire(b) == RowMove(source=1, target=1)
    assert simulation.scheduler.retire(c) == RowMove(source=0, target=0)
    assert not simulation.scheduler.has_work


def test_a_sequence_without_a_row_leaves_no_move(simulate: Callable[..., Simulation]) -> None:
    in_prefill, waiting = sequence(20, 2), sequence(4, 2)
    simulation = simulate(in_prefill, waiting, max_num_seqs=1, budget=8)
    simulation.step()
    assert simulation.scheduler.retire(waiting) is None
    assert simulation.scheduler.retire(in_prefill) is None
    assert not simulation.scheduler.has_work
