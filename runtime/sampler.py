"""Sampling state of every row of the batch, and the way from logits to tokens."""

import contextlib
import functools
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import (
    UNUSED_BIAS,
    LogprobsWorkspace,
    SampleWorkspace,
    SamplingRows,
    logprobs,
    num_bitmask_words,
    pack_token_bitmask,
    sample_rows,
    token_bitmask,
)
from .sample_road import SampleRoad, road_of
from .sampling_params import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams
from .staging_ring import StagingRing

MAX_BANNED_IDS = 2 * MAX_STOP_TOKEN_IDS  # a request's own stop ids and the model's end ids

# A row's numbers, in the columns of SamplingRows: they lie in one piece, so that one write changes them.
_NEUTRAL_REALS = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
_NEUTRAL_INTEGERS = (0, 0, 0, 0)


@dataclass(frozen=True)
class SampledTokens:
    """One token a row, and log-probabilities when a row of the batch asked for them.

    Attributes:
        token_ids: `[num_rows]` int64.
        logprobs: `[num_rows]` float32, of the sampled tokens.
        top_token_ids, top_logprobs: `[num_rows, k]` int64 and float32, most probable first; k is the largest number
            that a row asked for, and a row's own list is a prefix.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    top_token_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def for_logprobs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `logprobs` writes, which must be there."""
        assert self.logprobs is not None, "log-probabilities were asked for"
        assert self.top_token_ids is not None, "log-probabilities were asked for"
        assert self.top_logprobs is not None, "log-probabilities were asked for"
        return self.logprobs, self.top_token_ids, self.top_logprobs


class Sampler:
    """Owns the sampling numbers, masks of allowed tokens and token counts of `max_num_seqs` rows on one device.

    The host changes single rows (`set_row`, `clear_row`, `move_row`) in stream order with the steps and never rewrites
    an array; whatever changes from step to step is read on the device. A cleared row is greedy. What the kernels keep
    between their launches is claimed here.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, *, device: torch.device | str) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._reals = torch.empty(max_num_seqs, len(_NEUTRAL_REALS), dtype=torch.float32, device=device)
        self._integers = torch.empty(max_num_seqs, len(_NEUTRAL_INTEGERS), dtype=torch.int64, device=device)
        self._bias_ids = torch.empty(max_num_seqs, MAX_LOGIT_BIASES, dtype=torch.int64, device=device)
        self._biases = torch.empty(max_num_seqs, MAX_LOGIT_BIASES, dtype=torch.float32, device=device)
        self._banned_ids = torch.empty(max_num_seqs, MAX_BANNED_IDS, dtype=torch.int64, device=device)
        self._is_banned = torch.empty(max_num_seqs, MAX_BANNED_IDS, dtype=torch.bool, device=device)
        self._bitmask = torch.empty(max_num_seqs, num_bitmask_words(vocab_size), dtype=torch.int32, device=device)
        self._mask_staging: StagingRing | None = None
        self._row_numbers = torch.arange(max_num_seqs, device=device)
        self._counts: tuple[Tensor, Tensor] | None = None
        self._workspace: SampleWorkspace | None = None
        self._logprobs_workspace: LogprobsWorkspace | None = None
        if self.device.type == "cuda":
            self._workspace = SampleWorkspace(max_num_seqs, vocab_size, device=device)
            self._logprobs_workspace = LogprobsWorkspace(max_num_seqs, vocab_size, device=device)
        self.reset()

    def reset(self) -> None:
        """Clear every row at once, whatever state it was left in."""
        self._roads = [SampleRoad()] * self.max_num_seqs
        self._reals.copy_(torch.tensor(_NEUTRAL_REALS))
        self._integers.copy_(torch.tensor(_NEUTRAL_INTEGERS))
        self._biases.fill_(UNUSED_BIAS)
        self._bitmask.fill_(-1)
        for tensor in (self._bias_ids, self._banned_ids, self._is_banned):
            tensor.zero_()

    def claim_counts(self) -> tuple[Tensor, Tensor]:
        """The token counts, in_prompt bool and output_counts int32, both `[max_num_seqs, vocab_size]`.

        Allocated by the first row that has a penalty; call this before a capture, after which nothing may grow.
        """
        if self._counts is None:
            shape = (self.max_num_seqs, self.vocab_size)
            self._counts = (
                torch.zeros(shape, dtype=torch.bool, device=self.device),
                torch.zeros(shape, dtype=torch.int32, device=self.device),
            )
        return self._counts

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        *,
        sample_index: int = 0,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """Give a row to a request, which may already have generated `output_ids`.

        Args:
            seed: `params.seed`, or what the caller drew for a request without one; 0 ... 2**64 - 1.
            sample_index: which of the request's `n` samples.
            stop_token_ids: every id that ends the request (the model's end ids unless ignore_eos, and its own); none
                of them is sampled before min_tokens.

        Raises:
            ValueError: a token id of the params is outside the vocabulary, or there are too many stop_token_ids.
        """
        assert 0 <= row < self.max_num_seqs, f"row {row} is not one of {self.max_num_seqs}"
        assert 0 <= seed < 2**64, f"seed {seed} is not an unsigned 64-bit number"
        params.check_vocab(self.vocab_size)
        banned_ids = list(stop_token_ids) if params.min_tokens else []
        if len(banned_ids) > MAX_BANNED_IDS:
            raise ValueError(f"min_tokens: at most {MAX_BANNED_IDS} stop and end ids, got {len(banned_ids)}")

        previous, road = self._roads[row], road_of(params, self.vocab_size, bool(banned_ids))
        self._roads[row] = road
        signed_seed = seed - 2**64 if seed >= 2**63 else seed
        free_position = len(prompt_ids) - 1 + params.min_tokens
        self._reals[row] = torch.tensor(
            [
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ],
            dtype=torch.float32,
        )
        self._integers[row] = torch.tensor([params.top_k, signed_seed, sample_index, free_position])
        if road.biases or previous.biases:
            ids, biases = sorted(params.logit_bias), [params.logit_bias[i] for i in sorted(params.logit_bias)]
            unused = MAX_LOGIT_BIASES - len(ids)
            self._bias_ids[row] = torch.tensor([0] * unused + ids)
            self._biases[row] = torch.tensor([UNUSED_BIAS] * unused + biases)
        if road.bans or previous.bans:
            unused = MAX_BANNED_IDS - len(banned_ids)
            self._banned_ids[row] = torch.tensor([0] * unused + sorted(banned_ids))
            self._is_banned[row] = torch.tensor([False] * unused + [True] * len(banned_ids))
        if road.masks or previous.masks:
            self._bitmask[row] = self._words(params)
        if road.penalties:
            in_prompt, output_counts = self.claim_counts()
            in_prompt[row] = self._histogram(prompt_ids) > 0
            output_counts[row] = self._histogram(output_ids)

    def set_masks(self, rows: Sequence[int], words: Tensor) -> None:
        """What the next tokens of some rows may be, by one copy that nobody waits for.

        Args:
            rows: all different, each of a request with a function of allowed tokens.
            words: `[len(rows), num_bitmask_words(vocab_size)]` int32, on the host.
        """
        assert all(self._roads[row].masks for row in rows), "a step that samples without masks would not see them"
        if self._mask_staging is None:
            shape = self.max_num_seqs, 1 + self._bitmask.shape[1]
            self._mask_staging = StagingRing(shape, torch.int32, self.device, 2)
        records = torch.cat([torch.tensor(rows, dtype=torch.int32)[:, None], words], 1)
        staged = self._mask_staging.put(records)
        self._bitmask.index_copy_(0, staged[:, 0].to(torch.int64), staged[:, 1:])

    def clear_row(self, row: int) -> None:
        """Take a row from its request: greedy, no penalty, no bias, no mask, no log-probabilities."""
        self.set_row(row, SamplingParams(temperature=0.0), 0, ())

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`, on the device; the source stays as it is until it is cleared."""
        for tensor in self.row_tensors():
            tensor[target] = tensor[source]
        self._roads[target] = self._roads[source]

    def row_tensors(self) -> list[Tensor]:
        """All that the device knows of each row, `[max_num_seqs, …]`."""
        lists = self._bias_ids, self._biases, self._banned_ids, self._is_banned
        return [self._reals, self._integers, *lists, self._bitmask, *(self._counts or ())]

    def device_tensors(self) -> list[Tensor]:
        """All that sampling reads and writes on the device, what its kernels hand to each other included."""
        spaces = (one for one in (self._workspace, self._logprobs_workspace) if one is not None)
        handed = [tensor for one in spaces for tensor in vars(one).values() if isinstance(tensor, Tensor)]
        return [*self.row_tensors(), self._row_numbers, *handed]

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within the body rows may be set, and tokens sampled in any of them; that is undone at its end."""
        roads, before = list(self._roads), [tensor.clone() for tensor in self.row_tensors()]
        try:
            yield
        finally:
            self._roads = roads
            for tensor, values in zip(self.row_tensors(), before, strict=False):
                tensor.copy_(values)

    def road_of(self, params: SamplingParams) -> SampleRoad:
        """What a row needs for a request, before it has one. With min_tokens it is taken to have ids to ban."""
        return road_of(params, self.vocab_size, bool(params.min_tokens))

    def road(self, rows: Sequence[int]) -> SampleRoad:
        """What a batch of these rows needs, known on the host without looking at a tensor."""
        return functools.reduce(operator.or_, {self._roads[row] for row in rows}, SampleRoad())

    def sample(
        self,
        logits: Tensor,
        positions: Tensor,
        *,
        rows: Sequence[int] | None = None,
        road: SampleRoad | None = None,
        out: SampledTokens | None = None,
    ) -> SampledTokens:
        """Sample a token for each row of logits, and count it.

        Args:
            logits: `[num_rows, vocab_size]`, any float dtype; minus infinity is written to those of tokens that a row's
                mask leaves out, and nothing else changes.
            positions: `[num_rows]` int64, of the token that the logits come from: for a request's first sample that
                is the last token of its prompt.
            rows: the row that each belongs to, all different, in any order; None means the first num_rows rows.
            road: one that covers what the rows need; None: just what they need.
            out: with what the road asks for, written and returned when given.
        """
        num_rows = logits.shape[0]
        road = road or self.road(range(num_rows) if rows is None else rows)
        index = self._row_numbers[:num_rows] if rows is None else torch.tensor(rows, device=self.device)
        assert index.shape == positions.shape == (num_rows,), "one row number and one position for each row of logits"
        if road.masks:
            token_bitmask(logits, index, self._bitmask)
        lists = self._bias_ids, self._biases, self._banned_ids, self._is_banned
        counts = self.claim_counts() if road.penalties else ()
        state = SamplingRows(self._reals, self._integers, *lists, *counts)
        token_out = None if out is None else out.token_ids
        token_ids = sample_rows(logits, positions, index, state, road, workspace=self._workspace, out=token_out)
        if not road.logprobs:
            return SampledTokens(token_ids)
        probs_out = None if out is None else out.for_logprobs()
        k, workspace = road.num_top_logprobs, self._logprobs_workspace
        return SampledTokens(token_ids, *logprobs(logits, token_ids, k, workspace=workspace, out=probs_out))

    def _words(self, params: SamplingParams) -> Tensor | int:
        """A row of the bitmask; a function of allowed tokens is asked before each step, and until then leaves all."""
        allowed = params.allowed_token_ids
        if allowed is None or callable(allowed):
            return -1
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[list(allowed)] = True
        return pack_token_bitmask(mask)

    def _histogram(self, token_ids: Sequence[int]) -> Tensor:
        return torch.bincount(torch.tensor(token_ids, dtype=torch.int64), minlength=self.vocab_size)
