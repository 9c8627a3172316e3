"""Every bucket once replayed beside its own Python, on made-up rows: what differs by a bit is not used."""

import torch
from torch import Tensor

from ..kernels import FIRST_BLOCK, SINK_BLOCK
from .decode_graphs import DecodeGraphs
from .graph_buckets import BucketKey
from .graph_reason import Path, Reason
from .sampling_params import SamplingParams

NUM_READ_BLOCKS = 64
"""Blocks that all rows read their earlier keys from, so that a test of long contexts fills little memory."""


def self_test(graphs: DecodeGraphs, path: Path, *, smallest_only: bool = False) -> int:
    """Compare every captured bucket of a path with the eager run of the same launch plan on the same padded bucket.

    All rows of a bucket are live but the last (if there are more), and their contexts are once short and once as long
    as the table and the model admit. Outputs, step state and the keys and values written must be equal bit for bit; a
    bucket that differs is dropped with its reason. Needs free KV blocks, that is, an engine without sequences.

    Args:
        smallest_only: of each kind of sampling only the smallest bucket.

    Returns:
        How many buckets were compared.
    """
    kinds = [[key for key in config.bucket_keys() if graphs.has(path, key)] for config in graphs.configs]
    keys = [key for kind in kinds for key in (kind[-1:] if smallest_only else kind)]
    with graphs.at_rest():
        rows = _Rows(graphs)
        for key in keys:
            for name, length in (("short", rows.short), ("long", rows.longest)):
                wrong = rows.compare(path, key, length)
                if wrong:
                    detail = f"a replay over {name} contexts differs from its Python in {', '.join(wrong)}"
                    graphs.fail(path, key, detail, Reason.SELF_TEST_FAILED)
                    break
        graphs.pieces.sampler.reset()
    return len(keys)


class _Rows:
    """Made-up rows over the step state. Each writes to a block of its own and reads blocks that nobody writes."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self._graphs = graphs
        self._pieces = pieces = graphs.pieces
        state, cache = pieces.state, pieces.kv_cache
        num_rows, num_columns = state.block_tables.shape
        self._num_live = min(num_rows, (cache.num_blocks - FIRST_BLOCK) // 2)
        self._num_read = min(NUM_READ_BLOCKS, cache.num_blocks - FIRST_BLOCK - self._num_live)
        self.short = 1
        self.longest = min(num_columns * cache.block_size, pieces.model.config.max_position)
        generator = torch.Generator(device=graphs.backend.device).manual_seed(0)
        for layer in (*cache.k, *cache.v):
            layer[FIRST_BLOCK : FIRST_BLOCK + self._num_live + self._num_read].normal_(generator=generator)
        params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.001, repetition_penalty=1.1)
        for row in range(self._num_live):
            pieces.sampler.set_row(row, params, row, ())

    def compare(self, path: Path, key: BucketKey, length: int) -> list[str]:
        """What differs on a bucket, by name; contexts are of about that length."""
        live = min(self._num_live, max(1, key.bs - 1))
        eager = self._run(path, key, live, length, eager=True)
        replayed = self._run(path, key, live, length, eager=False)
        unequal = torch.stack([_differ(one, replayed[name]) for name, one in eager.items()]).tolist()
        return [name for name, differs in zip(eager, unequal, strict=True) if differs]

    def _run(self, path: Path, key: BucketKey, live: int, length: int, *, eager: bool) -> dict[str, Tensor]:
        """All that a step over these rows computes, copied."""
        pieces = self._pieces
        state, cache = pieces.state, pieces.kv_cache
        last_block, offset = self._fill(key.bs, live, length)
        written = [*cache.k, *cache.v]
        for layer in written:
            layer[last_block, :, offset] = torch.nan
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
        return found | {"keys and values": torch.stack([layer[last_block, :, offset] for layer in written])}

    def _fill(self, bs: int, live: int, length: int) -> tuple[Tensor, Tensor]:
        """Set the step state; returns the block and offset that each live row writes to."""
        state, cache, device = self._pieces.state, self._pieces.kv_cache, self._graphs.backend.device
        row = torch.arange(live, device=device)
        lens = (length + row % 3 if length == self.short else length - row % 3).clamp(1, self.longest)
        state.kill_rows(0, bs)
        self._pieces.sampler.claim_counts()[1][:bs].zero_()  # which a run has counted its tokens in
        state.token_ids[:live] = row * 37 % self._pieces.model.config.vocab_size
        state.positions[:live] = lens - 1
        state.seq_lens[:live] = lens.to(torch.int32)
        columns = torch.arange(state.block_tables.shape[1], device=device)
        last = (lens - 1) // cache.block_size
        own = FIRST_BLOCK + row
        read = FIRST_BLOCK + self._num_live + (columns[None, :] * 5 + row[:, None] * 7) % max(1, self._num_read)
        table = torch.where(columns[None, :] < last[:, None], read, SINK_BLOCK)
        state.block_tables[:live] = torch.where(columns[None, :] == last[:, None], own[:, None], table).to(torch.int32)
        return own, (lens - 1) % cache.block_size


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors differ in a bit, on their device."""
    if a.is_floating_point():
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.view(kind), b.view(kind)
    return (a != b).any()


def _nothing(layer: int, hidden: Tensor) -> None:
    """In place of hooks."""
