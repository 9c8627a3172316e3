"""From a scheduled batch to sampled tokens: the only place where the runtime runs the model."""

from dataclasses import dataclass

import torch

from ..model import Decoder, KVCache
from .decode_graphs import DecodeGraphs
from .decode_pieces import DecodePieces
from .decode_runner import DecodeRunner, Launched
from .graph_start import DecodePolicy
from .interventions import Hooks, edit_logits
from .prompt_runner import PromptRunner
from .sampler import SampledTokens, Sampler
from .scheduler import DecodeBatch, PrefillBatch
from .sequence import Sequence, TokenLogprobs
from .step_state import RowUpdate, StepState
from .token_masks import ask_for_masks


@dataclass(frozen=True)
class StepResult:
    """One new token for each of `sequences`; `logprobs` holds None for those that did not ask."""

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True)
class RunningStep:
    """A decode step on the device, of sequence `i` in row `i`; its tokens are still to come."""

    sequences: list[Sequence]
    launched: Launched


class ModelRunner:
    """Runs prompts and decode steps over one KV cache, in order, on the current stream.

    Args:
        hooks: on hidden states, of prompts and decode steps; None for none.
        policy: how decode steps run; None: eagerly.
        graphs: what replays them; None where they run eagerly.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        state: StepState,
        sampler: Sampler,
        *,
        hooks: Hooks | None = None,
        policy: DecodePolicy | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._state = state
        self._sampler = sampler
        hooks, policy = hooks if hooks is not None else Hooks(model.config.num_layers), policy or DecodePolicy()
        self._pieces = DecodePieces(model, kv_cache, state, sampler)
        self.decode_runner = DecodeRunner(self._pieces, hooks, policy, graphs)
        self._prompt_runner = PromptRunner(self._pieces, hooks, policy, graphs, self.decode_runner.counters)

    @torch.inference_mode()
    def run(self, batch: PrefillBatch | DecodeBatch, *, again: bool = False) -> StepResult:
        """Compute the batch; a prompt that is not through yet yields no token.

        Args:
            again: a decode step of the same rows will most likely be next.
        """
        return self._prefill(batch) if isinstance(batch, PrefillBatch) else self._decode(batch, again)

    @torch.inference_mode()
    def launch(self, batch: DecodeBatch) -> "RunningStep | None":
        """Start a decode step without waiting for its tokens; None if that cannot be, and `run` is for it."""
        launched = self.decode_runner.launch(batch.sequences)
        if launched is None:
            return None
        for sequence in batch.sequences:
            sequence.num_computed += 1
        return RunningStep(batch.sequences, launched)

    def finish(self, step: "RunningStep") -> StepResult:
        """Wait for the tokens of a decode step."""
        tokens = self.decode_runner.finish(step.launched).token_ids
        return StepResult(step.sequences, tokens, [None] * len(tokens))

    @torch.inference_mode()
    def retire_row(self, source: int, target: int) -> None:
        """Move row `source` over row `target` where they differ, and clear `source`."""
        if source != target:
            self._state.move_row(source, target)
            self._sampler.move_row(source, target)
        self._state.clear_rows([source])
        self._sampler.clear_row(source)

    @torch.inference_mode()
    def clear_rows(self) -> None:
        """Clear every row, whatever state an interrupted step left it in."""
        self._state.reset()
        self._sampler.reset()

    def _prefill(self, batch: PrefillBatch) -> StepResult:
        logits = self._prompt_runner.run(batch.chunks)
        if logits is None:
            return StepResult([], [], [])
        sequences = [chunk.sequence for chunk in batch.chunks if chunk.is_last]
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
        ask_for_masks(self._sampler, sequences, rows)
        edit_logits(logits, sequences)
        positions = torch.tensor([len(s.prompt_ids) - 1 for s in sequences], device=logits.device)
        sampled = self._sampler.sample(logits, positions, rows=rows)
        sampled_ids = sampled.token_ids.tolist()
        self._state.write_rows(
            [
                RowUpdate(row, token, len(s.prompt_ids), len(s.prompt_ids) + 1, s.blocks)
                for row, token, s in zip(rows, sampled_ids, sequences, strict=True)
            ]
        )
        return StepResult(sequences, sampled_ids, _logprobs(sampled, sequences))

    def _decode(self, batch: DecodeBatch, again: bool) -> StepResult:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        results = self.decode_runner.run(batch.sequences, again=again)
        for result in results:
            rows = batch.sequences[len(token_ids) : len(token_ids) + len(result.token_ids)]
            logprobs += _logprobs(result.sampled, rows)
            token_ids += result.token_ids
        for sequence in batch.sequences:
            sequence.num_computed += 1
        return StepResult(batch.sequences, token_ids, logprobs)


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
