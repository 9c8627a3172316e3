"""One batch at a time, put together by hand: what it computes, where it writes, and what it leaves alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import FIRST_BLOCK, SINK_BLOCK
from ostinato.model import Decoder, KVCache
from ostinato.runtime import SamplingParams, Sequence
from ostinato.runtime.model_runner import ModelRunner, StepResult
from ostinato.runtime.sampler import Sampler
from ostinato.runtime.scheduler import DecodeBatch, PrefillBatch, PrefillChunk
from ostinato.runtime.step_state import StepState
from ostinato.runtime.text_stream import TextStream

BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS = 16, 40, 6
TOLERANCE = {"rtol": 0, "atol": 2e-5}
"""For logits of size about 1 in float32, after two layers whose sums another batch may order differently."""


@dataclass
class Bench:
    """A runner and its parts. Blocks are dealt out in a scattered order: neighbours in a table are not so in memory."""

    model: Any
    poison: float = 0.0
    recorded: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.model
        self.kv_cache = KVCache.allocate(model.config, NUM_BLOCKS, BLOCK_SIZE, dtype=model.dtype, device=model.device)
        for cache in (*self.kv_cache.k, *self.kv_cache.v):
            cache.fill_(self.poison)
            cache[SINK_BLOCK].zero_()
        self.state = StepState(NUM_ROWS, NUM_BLOCKS, model.device)
        self.sampler = Sampler(NUM_ROWS, model.config.vocab_size, device=model.device)
        self.runner = ModelRunner(model, self.kv_cache, self.state, self.sampler)
        usable = NUM_BLOCKS - FIRST_BLOCK
        self.blocks = [FIRST_BLOCK + (7 * index) % usable for index in range(usable)]
        self.sequences: list[Sequence] = []

    def sequence(self, prompt_ids: list[int], params: SamplingParams | None = None, max_tokens: int = 20) -> Sequence:
        params = params or SamplingParams(temperature=0.0)
        one = Sequence(prompt_ids, params, 0, params.seed or 0, frozenset(), max_tokens, TextStream(None))
        num_blocks = -(-one.max_len // BLOCK_SIZE)
        one.blocks, self.blocks = self.blocks[:num_blocks], self.blocks[num_blocks:]
        return one

    def prefill(self, *spans: tuple[Sequence, int, int]) -> StepResult:
        """Runs a batch of (sequence, start, stop); sequences that it completes get the next rows."""
        chunks = [PrefillChunk(*span) for span in spans]
        for chunk in chunks:
            if chunk.is_last:
                chunk.sequence.row = len(self.sequences)
                self.sequences.append(chunk.sequence)
        return self._run(PrefillBatch(chunks))

    def decode(self) -> StepResult:
        return self._run(DecodeBatch(list(self.sequences)))

    def _run(self, batch: PrefillBatch | DecodeBatch) -> StepResult:
        head = self.model.head
        self.model.head = lambda hidden: self.recorded.append(head(hidden)) or self.recorded[-1]
        try:
            result = self.runner.run(batch)
        finally:
            del self.model.head
        for one, token_id in zip(result.sequences, result.token_ids, strict=True):
            one.output_ids.append(token_id)
        return result

    def changed_slots(self, step: Callable[[], Any]) -> set[int]:
        """KV slots that differ after a step, in any layer; every layer must agree on them."""
        caches = (*self.kv_cache.k, *self.kv_cache.v)
        before = [cache.clone() for cache in caches]
        step()
        found = []
        for old, new in zip(before, caches, strict=True):
            changed = (old != new).any(dim=3).any(dim=1)  # [num_blocks, block_size]
            assert torch.equal(changed, (old != new).all(dim=3).all(dim=1)), "slots are written whole"
            found.append(set(changed.flatten().nonzero().flatten().tolist()))
        assert all(slots == found[0] for slots in found)
        return found[0]


def slots_of(one: Sequence, start: int, stop: int) -> set[int]:
    return {one.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)}


def prompt(length: int, seed: int = 0, vocab_size: int = 61) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


MakeDecoder = Callable[..., Decoder]


def solo(model: Any, ids: list[int], num_decodes: int = 0) -> tuple[list[int], Tensor]:
    """Greedy tokens and the logits that each came from, `[1 + num_decodes, vocab_size]`, of a prompt in one chunk."""
    bench = Bench(model)
    one = bench.sequence(ids)
    bench.prefill((one, 0, len(ids)))
    for _ in range(num_decodes):
        bench.decode()
    return one.output_ids, torch.cat(bench.recorded)


@pytest.mark.parametrize("size", [1, 7, 16, 24, 39])
def test_b60_a_prompt_in_chunks_is_the_whole_prompt(tiny_decoder: MakeDecoder, device: str, size: int) -> None:
    """B60: over block borders, and the decode steps after it too."""
    model, ids = tiny_decoder(device), prompt(40)
    tokens, logits = solo(model, ids, num_decodes=3)
    bench = Bench(model)
    one = bench.sequence(ids)
    for start in range(0, len(ids), size):
        result = bench.prefill((one, start, min(start + size, len(ids))))
        assert result.sequences == ([one] if start + size >= len(ids) else [])
        assert one.num_computed == min(start + size, len(ids))
    for _ in range(3):
        bench.decode()
    assert one.output_ids == tokens
    torch.testing.assert_close(torch.cat(bench.recorded), logits, **TOLERANCE)


def test_b60_decoding_is_prefilling_a_longer_prompt(tiny_decoder: MakeDecoder, device: str) -> None:
    """B60: 20 steps over a block border, each against a fresh prefill of everything before it."""
    model, ids = tiny_decoder(device), prompt(9)
    tokens, logits = solo(model, ids, num_decodes=20)
    for index in range(21):
        token, again = solo(model, ids + tokens[:index])
        assert token == tokens[index : index + 1]
        torch.testing.assert_close(again, logits[index : index + 1], **TOLERANCE)


def test_a_ragged_batch_is_each_prompt_alone(tiny_decoder: MakeDecoder, device: str) -> None:
    """B60: lengths around block borders, together and in any row."""
    model = tiny_decoder(device)
    prompts = [prompt(length, seed=length) for length in (16, 1, 33, 15, 2, 17)]
    bench = Bench(model)
    sequences = [bench.sequence(ids) for ids in prompts]
    bench.prefill(*((one, 0, len(one.prompt_ids)) for one in sequences))
    for _ in range(4):
        bench.decode()
    for row, ids in enumerate(prompts):
        tokens, logits = solo(model, ids, num_decodes=4)
        assert sequences[row].output_ids == tokens
        torch.testing.assert_close(torch.stack([step[row] for step in bench.recorded]), logits, **TOLERANCE)


def test_b60_a_chunk_beside_other_prompts_and_between_decode_steps(tiny_decoder: MakeDecoder, device: str) -> None:
    """B60: the middle of a prompt, the end of another and a whole third in one batch."""
    model = tiny_decoder(device)
    early, late, whole = prompt(20, 1), prompt(37, 2), prompt(5, 3)
    bench = Bench(model)
    a, b, c = bench.sequence(early), bench.sequence(late), bench.sequence(whole)
    bench.prefill((a, 0, 11))
    bench.prefill((a, 11, 20), (b, 0, 3))
    bench.decode()
    assert bench.prefill((b, 3, 30)).token_ids == []
    bench.decode()
    result = bench.prefill((b, 30, 37), (c, 0, 5))
    assert result.sequences == [b, c]
    bench.decode()
    for one, ids, num_decodes in ((a, early, 3), (b, late, 1), (c, whole, 1)):
        assert one.output_ids == solo(model, ids, num_decodes)[0]


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 32])
def test_b37_exactly_the_new_tokens_slots_change(tiny_decoder: MakeDecoder, device: str, num_prompt: int) -> None:
    """B37: in a cache full of a sentinel; least of all in block 0, the sink, or the last slot."""
    bench = Bench(tiny_decoder(device), poison=12345.0)
    a, b = bench.sequence(prompt(num_prompt)), bench.sequence(prompt(20, seed=1))
    split = num_prompt // 2
    if split:
        assert bench.changed_slots(lambda: bench.prefill((a, 0, split))) == slots_of(a, 0, split)
    assert bench.changed_slots(lambda: bench.prefill((a, split, num_prompt), (b, 0, 20))) == (
        slots_of(a, split, num_prompt) | slots_of(b, 0, 20)
    )
    for step in range(18):
        expected = slots_of(a, num_prompt + step, num_prompt + step + 1) | slots_of(b, 20 + step, 21 + step)
        assert bench.changed_slots(bench.decode) == expected
    for cache in (*bench.kv_cache.k, *bench.kv_cache.v):
        assert cache[0].eq(12345.0).all()
        assert cache[SINK_BLOCK].eq(0.0).all()


def test_b38_a_retired_rows_slots_do_not_change_any_more(tiny_decoder: MakeDecoder, device: str) -> None:
    """B38: the last row moves into the gap and goes on where it was."""
    model = tiny_decoder(device)
    bench = Bench(model, poison=12345.0)
    prompts = [prompt(length, seed=length) for length in (18, 9, 30)]
    a, b, c = (bench.sequence(ids) for ids in prompts)
    bench.prefill((a, 0, 18), (b, 0, 9), (c, 0, 30))
    bench.decode()
    bench.runner.retire_row(2, 0)
    bench.sequences = [c, b]
    assert bench.changed_slots(bench.decode) == slots_of(b, 10, 11) | slots_of(c, 31, 32)
    bench.runner.retire_row(1, 1)
    bench.sequences = [c]
    assert bench.changed_slots(bench.decode) == slots_of(c, 32, 33)
    assert bench.state.seq_lens.tolist() == [34, *[0] * (NUM_ROWS - 1)]
    assert bench.state.block_tables[1:].eq(SINK_BLOCK).all()
    assert c.output_ids == solo(model, prompts[2], 3)[0]


def test_b38_garbage_in_dead_rows_changes_nothing(tiny_decoder: MakeDecoder, device: str) -> None:
    """B38, poison variant."""
    model, ids = tiny_decoder(device), prompt(20)
    bench = Bench(model)
    one = bench.sequence(ids)
    bench.prefill((one, 0, 20))
    bench.state.token_ids[1:], bench.state.positions[1:], bench.state.block_tables[1:] = 60, 600, 0
    sampler = bench.sampler
    sampler._reals[1:], sampler._integers[1:] = float("nan"), 2**40
    for _ in range(3):
        bench.decode()
    tokens, logits = solo(model, ids, 3)
    assert one.output_ids == tokens
    assert torch.equal(torch.cat(bench.recorded), logits)
    assert bench.state.positions[1:].eq(600).all()


def test_what_the_cache_held_before_changes_no_bit(tiny_decoder: MakeDecoder, device: str) -> None:
    """B38, B47: NaN in every block that nobody has written."""
    model, prompts = tiny_decoder(device), [prompt(17), prompt(3, seed=1)]
    logits = []
    for poison in (0.0, float("nan"), float("inf")):
        bench = Bench(model, poison=poison)
        a, b = (bench.sequence(ids) for ids in prompts)
        bench.prefill((a, 0, 10), (b, 0, 3))
        bench.prefill((a, 10, 17))
        for _ in range(3):
            bench.decode()
        logits.append(torch.cat(bench.recorded))
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_a_row_of_a_cleared_request_samples_greedily(fake_model: Callable[..., Any], hashed: Any, device: str) -> None:
    """B38: also where the last row has moved away, none of the old request's sampling stays behind."""
    bench = Bench(fake_model(hashed, device))
    hot = SamplingParams(temperature=5.0, seed=1, logit_bias={3: 100.0}, presence_penalty=1.0, logprobs=True)
    a, b = bench.sequence(prompt(5), hot), bench.sequence(prompt(6), hot)
    bench.prefill((a, 0, 5), (b, 0, 6))
    bench.runner.retire_row(1, 0)
    assert bench.sampler.road([1]) == bench.sampler.road([5])
    bench.runner.retire_row(0, 0)
    assert bench.sampler.road([0, 1]) == bench.sampler.road([5])
    greedy = [bench.sequence(ids) for ids in (prompt(7), prompt(8))]
    bench.sequences = []
    bench.prefill(*((one, 0, len(one.prompt_ids)) for one in greedy))
    bench.decode()
    for one in greedy:
        ids = one.prompt_ids
        first = int(hashed(ids).argmax())
        assert one.output_ids == [first, int(hashed([*ids, first]).argmax())]


def test_only_rows_that_asked_get_logprobs(fake_model: Callable[..., Any], hashed: Any, device: str) -> None:
    """Each with as many alternatives as it asked for, in prefill and decode; all of the model's own distribution."""
    bench = Bench(fake_model(hashed, device))
    asks = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=True),
        SamplingParams(temperature=1.5, seed=3, logprobs=True, top_logprobs=2, frequency_penalty=1.0),
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=0.0, logprobs=True, top_logprobs=5),
    ]
    sequences = [bench.sequence(prompt(5 + row), params) for row, params in enumerate(asks)]
    steps = [bench.prefill(*((one, 0, len(one.prompt_ids)) for one in sequences))]
    steps += [bench.decode() for _ in range(2)]
    for number, step in enumerate(steps):
        for one, logprobs in zip(step.sequences, step.logprobs, strict=True):
            if not one.params.logprobs:
                assert logprobs is None
                continue
            exact = hashed(one.prompt_ids + one.output_ids[:number]).double().log_softmax(0)
            best = exact.sort(descending=True)
            assert logprobs is not None
            assert logprobs.logprob == pytest.approx(exact[one.output_ids[number]].item(), abs=1e-5)
            k = one.params.top_logprobs
            assert [token_id for token_id, _ in logprobs.top] == best.indices[:k].tolist()
            assert [logprob for _, logprob in logprobs.top] == pytest.approx(best.values[:k].tolist(), abs=1e-5)
    assert bench.decode().logprobs[0] is None


def test_without_askers_there_are_no_logprobs(fake_model: Callable[..., Any], hashed: Any) -> None:
    bench = Bench(fake_model(hashed))
    one = bench.sequence(prompt(5))
    assert bench.prefill((one, 0, 5)).logprobs == [None]
    assert bench.decode().logprobs == [None]
