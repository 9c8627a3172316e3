"""Every bucket once replayed beside its own Python, on made-up rows: what differs by a bit is not used."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import FIRST_BLOCK, SINK_BLOCK
from .decode_graphs import DecodeGraphs
from .graph_buckets import BucketKey
from .graph_reason import Path, Reason
from .prompt_pieces import PROMPT_WALK, num_columns
from .sampling_params import SamplingParams

NUM_READ_BLOCKS = 64
"""Blocks that all rows read their earlier keys from, so that a test of long contexts fills little memory."""


def self_test(graphs: DecodeGraphs, path: Path, *, ends_only: bool = False) -> int:
    """Compare every captured bucket of a path with the eager run of the same launch plan on the same padded bucket.

    All rows of a bucket are live but the last (if there are more), and their contexts are once short and once as long
    as the table and the model admit. Outputs, step state and the keys and values written must be equal bit for bit; a
    bucket that differs is dropped with its reason. The engine must be without sequences.

    Args:
        ends_only: of each kind of sampling only the largest bucket and the smallest.

    Returns:
        How many buckets were compared.
    """
    fill_read_blocks(graphs)
    kinds = [[key for key in config.bucket_keys() if graphs.has(path, key)] for config in graphs.configs]
    keys = [key for kind in kinds for key in (dict.fromkeys(kind[:1] + kind[-1:]) if ends_only else kind)]
    _compare(graphs, path, keys)
    return len(keys)


def self_test_late(graphs: DecodeGraphs, path: Path, key: BucketKey) -> None:
    """The same for one bucket that was captured between two steps; rows, keys and values of sequences stay as they are.

    Rows of the test read whatever lies in the cache, which `fill_read_blocks` has made numbers of at start.
    """
    _compare(graphs, path, [key])


@torch.inference_mode()
def fill_read_blocks(graphs: DecodeGraphs) -> None:
    """Random numbers for keys and values that self-tests read; the engine must be without sequences."""
    cache, layout = graphs.pieces.kv_cache, _Layout.of(graphs)
    generator = torch.Generator(device=graphs.backend.device).manual_seed(0)
    for layer in (*cache.k, *cache.v):
        layer[FIRST_BLOCK : layout.first_read + layout.num_read].normal_(generator=generator)


def _compare(graphs: DecodeGraphs, path: Path, keys: Sequence[BucketKey]) -> None:
    with graphs.at_rest():
        rows = _Rows(graphs, max((key.bs for key in keys), default=0))
        for key in keys:
            compare = partial(rows.compare, path, key)
            if key.graph_walk == PROMPT_WALK:
                compare = partial(_compare_prompt, graphs, key)
            for name, length in (("short", rows.short), ("long", rows.longest)):
                try:
                    wrong = compare(length)
                except Exception as error:
                    wrong = [f"that it cannot run: {type(error).__name__}: {error}"]
                if wrong:
                    detail = f"a replay over {name} contexts differs from its Python in {', '.join(wrong)}"
                    graphs.fail(path, key, detail, Reason.SELF_TEST_FAILED)
                    break
    graphs.addresses.forget()  # these were nobody's replays


class _Layout(NamedTuple):
    """Which blocks rows of a test use: each writes to one of its own, behind which lie those that all read."""

    num_live: int
    first_read: int
    num_read: int

    @classmethod
    def of(cls, graphs: DecodeGraphs) -> "_Layout":
        num_rows, num_blocks = len(graphs.pieces.state.seq_lens), graphs.pieces.kv_cache.num_blocks
        num_live = min(num_rows, (num_blocks - FIRST_BLOCK) // 2)
        first_read = FIRST_BLOCK + num_live
        return cls(num_live, first_read, min(NUM_READ_BLOCKS, num_blocks - first_read))


class _Rows:
    """Made-up rows over the step state, which must be at rest; `num_rows` of them at most."""

    def __init__(self, graphs: DecodeGraphs, num_rows: int) -> None:
        self._graphs = graphs
        self._pieces = pieces = graphs.pieces
        self._layout = _Layout.of(graphs)
        self.short = 1
        self.longest = min(
            pieces.state.block_tables.shape[1] * pieces.kv_cache.block_size, pieces.model.config.max_position
        )
        plain = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.001, repetition_penalty=1.1)
        vocab_size = pieces.model.config.vocab_size
        masked = replace(plain, allowed_token_ids=range(0, vocab_size, 1 + vocab_size // 1000))
        for row in range(min(self._layout.num_live, num_rows)):
            pieces.sampler.set_row(row, plain if row % 2 else masked, row, ())

    def compare(self, path: Path, key: BucketKey, length: int) -> list[str]:
        """What differs on a bucket, by name; contexts are of about that length."""
        live = min(self._layout.num_live, max(1, key.bs - 1))
        lens = self._lens(live, length)
        block, offset = self._slots(lens)
        layers = [*self._pieces.kv_cache.k, *self._pieces.kv_cache.v]
        held = [layer[block, :, offset] for layer in layers]
        try:
            eager = self._run(path, key, lens, eager=True)
            replayed = self._run(path, key, lens, eager=False)
        finally:
            for layer, values in zip(layers, held, strict=True):
                layer[block, :, offset] = values
        return _unequal(eager, replayed)

    def _run(self, path: Path, key: BucketKey, lens: Tensor, *, eager: bool) -> dict[str, Tensor]:
        """All that a step over rows of these lengths computes, copied."""
        pieces, live = self._pieces, len(lens)
        state, cache = pieces.state, pieces.kv_cache
        self._fill(key.bs, lens)
        block, offset = self._slots(lens)
        written = [*cache.k, *cache.v]
        for layer in written:
            layer[block, :, offset] = torch.nan
        failed: list[Exception] = []
        if path is Path.WHOLE:
            outputs = self._graphs.run_whole(key, live, eager=eager, replay_failed=failed.append)
        else:
            outputs = self._graphs.step.run(
                key, live, eager=eager, at_layer=_nothing, at_logits=None, replay_failed=failed.append
            )
        if failed:
            raise failed[0]
        found = {f"output {name}": tensor[:live].clone() for name, tensor in outputs.items()}
        names = ("token_ids", "positions", "seq_lens", "block_tables")
        found |= {name: tensor[: key.bs].clone() for name, tensor in zip(names, state.row_tensors(), strict=True)}
        return found | {"keys and values": torch.stack([layer[block, :, offset] for layer in written])}

    def _lens(self, live: int, length: int) -> Tensor:
        """Keys of each live row, the new one included: about as many as `length`."""
        row = torch.arange(live, device=self._graphs.backend.device)
        return (length + row % 3 if length == self.short else length - row % 3).clamp(1, self.longest)

    def _slots(self, lens: Tensor) -> tuple[Tensor, Tensor]:
        """The block and offset that each live row writes to."""
        return FIRST_BLOCK + torch.arange(len(lens), device=lens.device), (lens - 1) % self._pieces.kv_cache.block_size

    def _fill(self, bs: int, lens: Tensor) -> None:
        """Set the step state."""
        state, live = self._pieces.state, len(lens)
        row, columns = (torch.arange(n, device=lens.device) for n in (live, state.block_tables.shape[1]))
        state.kill_rows(0, bs)
        self._pieces.sampler.claim_counts()[1][:bs].zero_()  # which a run has counted its tokens in
        state.token_ids[:live] = row * 37 % self._pieces.model.config.vocab_size
        state.positions[:live] = lens - 1
        state.seq_lens[:live] = lens.to(torch.int32)
        last = (lens - 1) // self._pieces.kv_cache.block_size
        read = self._layout.first_read + (columns[None, :] * 5 + row[:, None] * 7) % max(1, self._layout.num_read)
        table = torch.where(columns[None, :] < last[:, None], read, SINK_BLOCK)
        own, _ = self._slots(lens)
        state.block_tables[:live] = torch.where(columns[None, :] == last[:, None], own[:, None], table).to(torch.int32)


def _compare_prompt(graphs: DecodeGraphs, key: BucketKey, length: int) -> list[str]:
    """What differs on a bucket of prompts, by name; the prompt has about that many tokens, and the bucket padding."""
    cache, vocab_size = graphs.pieces.kv_cache, graphs.pieces.model.config.vocab_size
    own = slice(FIRST_BLOCK, min(FIRST_BLOCK + num_columns(key, cache.block_size), cache.num_blocks))
    blocks = range(own.start, own.stop)
    token_ids = [i * 37 % vocab_size for i in range(min(length, max(1, key.num_tokens - 1)))]
    token_ids = token_ids[: len(blocks) * cache.block_size]
    layers = [*cache.k, *cache.v]
    held = [layer[own].clone() for layer in layers]
    failed: list[Exception] = []

    def run(eager: bool) -> dict[str, Tensor]:
        for layer in layers:
            layer[own] = torch.nan
        logits = graphs.run_prompt(key, token_ids, blocks, eager=eager, replay_failed=failed.append)
        return {"output logits": logits.clone(), "keys and values": torch.stack([layer[own] for layer in layers])}

    try:
        unequal = _unequal(run(True), run(False))
    finally:
        for layer, values in zip(layers, held, strict=True):
            layer[own] = values
    if failed:
        raise failed[0]
    return unequal


def _unequal(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that differ."""
    unequal = torch.stack([_differ(one, others[name]) for name, one in some.items()]).tolist()
    return [name for name, differs in zip(some, unequal, strict=True) if differs]


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors differ in a bit, on their device."""
    if a.is_floating_point():
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.view(kind), b.view(kind)
    return (a != b).any()


def _nothing(layer: int, hidden: Tensor) -> None:
    """In place of hooks."""
