"""Steps without buckets: prompts, and decode steps on exactly their rows."""

import itertools
from collections.abc import Sequence as SequenceOf

from torch import Tensor

from ..model import AttentionMetadata
from .decode_pieces import DecodePieces
from .interventions import HookRow, Hooks, edit_logits
from .sampler import SampledTokens
from .sequence import Sequence


def run_rows(pieces: DecodePieces, hooks: Hooks, sequences: SequenceOf[Sequence]) -> SampledTokens:
    """A decode step of exactly these rows; the host knows how far their tables reach."""
    n = len(sequences)
    state, kv_cache, model = pieces.state, pieces.kv_cache, pieces.model
    num_columns = max(sequence.num_computed for sequence in sequences) // kv_cache.block_size + 1
    metadata = AttentionMetadata(state.block_tables[:n, :num_columns], state.seq_lens[:n])
    preamble = model.preamble(state.token_ids[:n], state.positions[:n], metadata, kv_cache.block_size)
    hidden = run_blocks(pieces, preamble.hidden, preamble, metadata, hooks, hook_rows(sequences))
    logits = model.head(hidden)
    edit_logits(logits, sequences)
    sampled = pieces.sampler.sample(logits, state.positions[:n])
    pieces.commit(sampled.token_ids)
    return sampled


def run_blocks(
    pieces: DecodePieces,
    hidden: Tensor,
    preamble: object,
    metadata: AttentionMetadata,
    hooks: Hooks,
    rows: tuple[HookRow, ...],
) -> Tensor:
    """The block stack, eagerly, with its hooks."""
    model, kv_cache = pieces.model, pieces.kv_cache
    if not hooks:
        return model.blocks(hidden, preamble, metadata, kv_cache)  # type: ignore[arg-type]
    num_layers = pieces.num_layers
    edges = sorted({0, num_layers, *hooks.layers})
    for start, stop in itertools.pairwise(edges):
        hooks.apply(start, hidden, rows)
        hidden = model.blocks(hidden, preamble, metadata, kv_cache, start, stop)  # type: ignore[arg-type]
    hooks.apply(num_layers, hidden, rows)
    return hidden


def hook_rows(sequences: SequenceOf[Sequence]) -> tuple[HookRow, ...]:
    """The rows of a decode step, one token each."""
    return tuple(
        HookRow(i, i + 1, s.num_computed, s.prompt_ids, s.output_ids, s.sample_index) for i, s in enumerate(sequences)
    )
