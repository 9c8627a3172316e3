"""Runs prompts: in one graph where their bucket has one, else eagerly, and says why."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model import AttentionMetadata
from .decode_graphs import DecodeGraphs
from .decode_pieces import DecodePieces
from .eager_step import run_blocks
from .graph_buckets import BucketKey
from .graph_counters import GraphCounters
from .graph_reason import Path, Reason
from .graph_start import DecodePolicy
from .inference_graph_capture import StepMode
from .interventions import HookRow, Hooks
from .late_captures import LateCaptures
from .scheduler import PrefillChunk


class PromptRunner:
    """One object for all prompts of an engine. Their graphs are captured late, each when its bucket has been in use.

    Args:
        counters: where it is counted how prompts ran.
        graphs: None where graphs are off.
    """

    def __init__(
        self,
        pieces: DecodePieces,
        hooks: Hooks,
        policy: DecodePolicy,
        graphs: DecodeGraphs | None,
        counters: GraphCounters,
    ) -> None:
        self._pieces = pieces
        self._hooks = hooks
        self._counters = counters
        self._forced = policy.forced
        self._graphs = graphs if graphs is not None and graphs.prompts is not None else None
        self._late = None
        if self._graphs is not None:
            self._late = LateCaptures(self._graphs, policy.prompt_lazy_steps, policy.self_test)

    def decide(self, chunks: Sequence[PrefillChunk]) -> tuple[BucketKey | None, Reason]:
        """The bucket that a batch of prompts is padded to, and why it replays or does not; changes nothing.

        None: the tokens run eagerly as they are.
        """
        graphs, late = self._graphs, self._late
        if graphs is None or late is None or graphs.prompts is None:
            return None, Reason.PREFILL
        if self._hooks:
            return None, Reason.PROMPT_HOOK
        if len(chunks) > 1:
            return None, Reason.PROMPTS_TOGETHER
        [chunk] = chunks
        if chunk.start > 0 or not chunk.is_last:
            return None, Reason.PROMPT_IN_PARTS
        keys = sorted(graphs.prompts.bucket_keys(), key=lambda key: key.num_tokens)
        fitting = [key for key in keys if key.num_tokens >= chunk.stop]
        if not fitting:
            return None, Reason.PROMPT_TOO_LONG
        missing = {key: graphs.missing(Path.WHOLE, key) for key in fitting}
        key = next((key for key in fitting if missing[key] is None), fitting[0])
        if self._forced:
            return key, Reason.FORCED
        if late.step_mode(Path.WHOLE, key, ()) is StepMode.WARMUP:
            return key, Reason.WARMUP
        return key, missing[key] or Reason.PROMPT

    def run(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """The logits behind the last token of each prompt that is through, `[num_done, vocab_size]`; None if none is.

        A replay's logits hold until the next prompt.
        """
        key, reason = self.decide(chunks)
        if key is None:
            logits = self._run_as_they_are(chunks)
        else:
            reason, logits = self._run_bucket(key, reason, chunks[0])
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.stop
        self._counters.count_prompts(reason)
        return logits

    def _run_bucket(self, key: BucketKey, reason: Reason, chunk: PrefillChunk) -> tuple[Reason, Tensor]:
        graphs, late = self._graphs, self._late
        assert graphs is not None, "a bucket belongs to graphs"
        assert late is not None, "there are late captures where there are graphs"
        done = reason
        if reason is Reason.PROMPT and not late.ready(Path.WHOLE, key):
            done = graphs.missing(Path.WHOLE, key) or reason

        def replay_failed(error: Exception) -> None:
            nonlocal done
            done = Reason.REPLAY_FAILED
            graphs.fail(Path.WHOLE, key, f"{type(error).__name__}: {error}", done)

        sequence, eager = chunk.sequence, done is not Reason.PROMPT
        logits = graphs.run_prompt(key, sequence.prompt_ids, sequence.blocks, eager=eager, replay_failed=replay_failed)
        if not self._forced:
            late.advance(Path.WHOLE, key)
        return done, logits

    def _run_as_they_are(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        model, kv_cache = self._pieces.model, self._pieces.kv_cache
        sizes = [chunk.stop - chunk.start for chunk in chunks]
        ids = [i for chunk in chunks for i in chunk.sequence.prompt_ids[chunk.start : chunk.stop]]
        width = -(-max(chunk.stop for chunk in chunks) // kv_cache.block_size)
        # Columns past a sequence's own blocks repeat its first one: they are never visible.
        tables = [(c.sequence.blocks + c.sequence.blocks[:1] * width)[:width] for c in chunks]
        metadata = AttentionMetadata(
            block_tables=self._tensor(tables, torch.int32),
            seq_lens=self._tensor([chunk.stop for chunk in chunks], torch.int32),
            cu_seqlens_q=self._tensor([0, *sizes], torch.int32).cumsum(0, dtype=torch.int32),
        )
        positions = self._tensor([p for chunk in chunks for p in range(chunk.start, chunk.stop)], torch.int64)
        preamble = model.preamble(self._tensor(ids, torch.int64), positions, metadata, kv_cache.block_size)
        hidden = run_blocks(self._pieces, preamble.hidden, preamble, metadata, self._hooks, _hook_rows(chunks))
        ends = torch.tensor(sizes).cumsum(0) - 1
        done = [int(end) for chunk, end in zip(chunks, ends, strict=True) if chunk.is_last]
        return model.head(hidden[self._tensor(done, torch.int64)]) if done else None

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._pieces.model.device)


def _hook_rows(chunks: Sequence[PrefillChunk]) -> tuple[HookRow, ...]:
    rows, start = [], 0
    for chunk in chunks:
        s, stop = chunk.sequence, start + chunk.stop - chunk.start
        rows.append(HookRow(start, stop, chunk.start, s.prompt_ids, s.output_ids, s.sample_index))
        start = stop
    return tuple(rows)
