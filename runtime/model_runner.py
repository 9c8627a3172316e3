"""From a scheduled batch to sampled tokens: the only place where the runtime runs the model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model import AttentionMetadata, Decoder, KVCache
from .sampler import SampledTokens, Sampler
from .scheduler import DecodeBatch, PrefillBatch
from .sequence import Sequence, TokenLogprobs
from .step_state import RowUpdate, StepState


@dataclass(frozen=True)
class StepResult:
    """One new token for each of `sequences`; `logprobs` holds None for those that did not ask."""

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class ModelRunner:
    """Runs prompts and decode steps over one KV cache, in order, on the current stream."""

    def __init__(self, model: Decoder, kv_cache: KVCache, state: StepState, sampler: Sampler) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._state = state
        self._sampler = sampler

    @torch.inference_mode()
    def run(self, batch: PrefillBatch | DecodeBatch) -> StepResult:
        """Compute the batch; a prompt that is not through yet yields no token."""
        return self._prefill(batch) if isinstance(batch, PrefillBatch) else self._decode(batch)

    @torch.inference_mode()
    def retire_row(self, source: int, target: int) -> None:
        """Move row `source` over row `target` where they differ, and clear `source`."""
        if source != target:
            self._state.move_row(source, target)
            self._sampler.move_row(source, target)
        self._state.clear_rows([source])
        self._sampler.clear_row(source)

    def _prefill(self, batch: PrefillBatch) -> StepResult:
        chunks = batch.chunks
        sizes = [chunk.stop - chunk.start for chunk in chunks]
        ids = [i for chunk in chunks for i in chunk.sequence.prompt_ids[chunk.start : chunk.stop]]
        width = max(len(chunk.sequence.blocks) for chunk in chunks)
        # Columns past a sequence's own blocks repeat its first one: they are never visible.
        tables = [c.sequence.blocks + c.sequence.blocks[:1] * (width - len(c.sequence.blocks)) for c in chunks]
        metadata = AttentionMetadata(
            block_tables=self._tensor(tables, torch.int32),
            seq_lens=self._tensor([chunk.stop for chunk in chunks], torch.int32),
            cu_seqlens_q=self._tensor([0, *sizes], torch.int32).cumsum(0, dtype=torch.int32),
        )
        positions = self._tensor([p for chunk in chunks for p in range(chunk.start, chunk.stop)], torch.int64)
        hidden = self._forward(self._tensor(ids, torch.int64), positions, metadata)
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.stop
        ends = torch.tensor(sizes).cumsum(0) - 1
        done = [(chunk.sequence, int(end)) for chunk, end in zip(chunks, ends, strict=True) if chunk.is_last]
        if not done:
            return StepResult([], [], [])
        sequences = [sequence for sequence, _ in done]
        rows = [_row(sequence) for sequence in sequences]
        for row, sequence in zip(rows, sequences, strict=True):
            self._sampler.set_row(
                row,
                sequence.params,
                sequence.seed,
                sequence.prompt_ids,
                sample_index=sequence.sample_index,
                stop_token_ids=sequence.stop_ids,
            )
        last = self._tensor([end for _, end in done], torch.int64)
        sampled = self._sampler.sample(self._model.head(hidden[last]), positions[last], rows=rows)
        token_ids = sampled.token_ids.tolist()
        self._state.write_rows(
            [
                RowUpdate(row, token, len(s.prompt_ids), len(s.prompt_ids) + 1, s.blocks)
                for row, token, s in zip(rows, token_ids, sequences, strict=True)
            ]
        )
        return StepResult(sequences, token_ids, _logprobs(sampled, sequences))

    def _decode(self, batch: DecodeBatch) -> StepResult:
        n, state, sequences = len(batch.sequences), self._state, batch.sequences
        # The host knows how far the tables reach; the attention reference gathers every column that it is given.
        width = max(sequence.num_computed for sequence in sequences) // self._kv_cache.block_size + 1
        positions = state.positions[:n]
        metadata = AttentionMetadata(state.block_tables[:n, :width], state.seq_lens[:n])
        hidden = self._forward(state.token_ids[:n], positions, metadata)
        sampled = self._sampler.sample(self._model.head(hidden), positions)
        step = state.commit(sampled.token_ids)
        for sequence in sequences:
            sequence.num_computed += 1
        return StepResult(sequences, state.read(step, n), _logprobs(sampled, sequences))

    def _forward(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        model, kv_cache = self._model, self._kv_cache
        preamble = model.preamble(token_ids, positions, metadata, kv_cache.block_size)
        return model.blocks(preamble.hidden, preamble, metadata, kv_cache)

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._model.device)


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "a sequence whose prompt is complete stands in a row"
    return sequence.row


def _logprobs(sampled: SampledTokens, sequences: list[Sequence]) -> list[TokenLogprobs | None]:
    """The logprobs of each sequence that asked for them, with as many alternatives as it asked for."""
    if sampled.logprobs is None:
        return [None] * len(sequences)
    logprobs = sampled.logprobs.tolist()
    no_tops: list[list[int]] = [[]] * len(sequences)
    top_ids = no_tops if sampled.top_token_ids is None else sampled.top_token_ids.tolist()
    tops = no_tops if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
    return [
        TokenLogprobs(logprobs[i], list(zip(top_ids[i], tops[i], strict=True))[: sequence.params.top_logprobs])
        if sequence.params.logprobs
        else None
        for i, sequence in enumerate(sequences)
    ]
