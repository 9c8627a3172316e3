"""From the logits of a step to its tokens, with everything that a row may ask of sampling."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from . import _triton
from ._sample_draw import choose_kernel, race_kernel, scan_kernel
from ._sample_select import NUM_SUMS, collect_kernel, count_kernel, least_kernel, plan_kernel, resolve_kernel
from ._sample_values import GROUP, ID_BITS, NUM_BINS
from ._triton import triton
from .argmax import greedy_ref
from .logit_bias import ban_tokens_ref, logit_bias_ref
from .penalties import count_tokens_ref, penalties_ref
from .sample import sample_ref

# The columns of a row's numbers; the kernels spell them out.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
TOP_K, SEED, SAMPLE_INDEX, FREE_POSITION = range(4)

CAPACITY = 4096  # tokens of a row that the borders of its filters may lie among, before the row is searched whole
FEW = 256  # tokens of a row that one program ranks, each against each
_LEAST_BLOCK, _MOST_BLOCK = 1024, 2048


@dataclass(frozen=True)
class SamplingRows:
    """What the device knows of each row of the batch; every tensor is contiguous.

    Attributes:
        reals: `[max_num_seqs, 6]` float32: temperature, top_p, min_p, repetition, presence, frequency.
        integers: `[max_num_seqs, 4]` int64: top_k, seed, sample index, and the position from which nothing is banned.
        bias_ids, biases: `[max_num_seqs, width]` int64 and float32; ids ascend, unused entries are in front, with id 0
            and `UNUSED_BIAS`. The width is a power of two.
        banned_ids, is_banned: `[max_num_seqs, width]` int64 and bool; ids ascend, unused entries are in front.
        in_prompt, output_counts: `[max_num_seqs, vocab_size]` bool and int32, or None where no row has penalties.
    """

    reals: Tensor
    integers: Tensor
    bias_ids: Tensor
    biases: Tensor
    banned_ids: Tensor
    is_banned: Tensor
    in_prompt: Tensor | None = None
    output_counts: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        for one in fields(self):
            tensor = getattr(self, one.name)
            if tensor is not None:
                yield tensor


@dataclass(frozen=True)
class SampleSteps:
    """Which operations a batch needs; one that is left out must change nothing for any of its rows."""

    random: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    biases: bool = False
    bans: bool = False


class SampleWorkspace:
    """What the kernels keep between their launches: 44 KB a row at a vocabulary of 128k. Its content is no one's."""

    def __init__(self, max_num_rows: int, vocab_size: int, *, device: torch.device | str) -> None:
        self.max_num_rows, self.vocab_size = max_num_rows, vocab_size
        num_chunks = -(-vocab_size // _LEAST_BLOCK)

        def claim(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(max_num_rows * width, dtype=dtype, device=device)

        self.values = claim(num_chunks, torch.float32)
        self.ids = claim(num_chunks, torch.int32)
        self.lows = claim(num_chunks, torch.float32)
        self.race_values = claim(num_chunks, torch.float32)
        self.race_ids = claim(num_chunks, torch.int32)
        self.maxima = claim(-(-vocab_size // _MOST_BLOCK) * _MOST_BLOCK // GROUP, torch.float32)
        self.histogram = claim(NUM_BINS, torch.int32)
        self.sums = claim(NUM_SUMS, torch.int64)
        self.listed = claim(CAPACITY, torch.int64)


def sample_rows_ref(
    logits: Tensor,
    positions: Tensor,
    rows: Tensor,
    state: SamplingRows,
    steps: SampleSteps,
    *,
    workspace: SampleWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token for each row of logits: biases, penalties, bans, then `sample_ref`, or `greedy_ref`; count it.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype; not changed.
        positions: `[num_rows]` int64, of the token that the logits come from.
        rows: `[num_rows]` int64, which of the state's rows each belongs to; all different.
        state: `output_counts` changes in place where steps has penalties.
        workspace: for the kernels; the reference needs none.
        out: `[num_rows]` int64, written and returned when given.
    """
    reals, integers = state.reals[rows].unbind(1), state.integers[rows].unbind(1)
    if steps.biases:
        logits = logit_bias_ref(logits, state.bias_ids[rows], state.biases[rows])
    if steps.penalties:
        assert state.in_prompt is not None, "penalties stand on token counts"
        assert state.output_counts is not None, "penalties stand on token counts"
        strengths = reals[REPETITION], reals[PRESENCE], reals[FREQUENCY]
        logits = penalties_ref(logits, state.in_prompt[rows], state.output_counts[rows], *strengths)
    if steps.bans:
        active = state.is_banned[rows] & (positions < integers[FREE_POSITION])[:, None]
        logits = ban_tokens_ref(logits, state.banned_ids[rows], active)
    if steps.random:
        token_ids = sample_ref(
            logits,
            reals[TEMPERATURE],
            integers[TOP_K] if steps.top_k else None,
            reals[TOP_P] if steps.top_p else None,
            reals[MIN_P] if steps.min_p else None,
            integers[SEED],
            integers[SAMPLE_INDEX],
            positions,
            out=out,
        )
    else:
        token_ids = greedy_ref(logits, out=out)
    if steps.penalties:
        assert state.output_counts is not None
        count_tokens_ref(state.output_counts, rows, token_ids)
    return token_ids


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    rows: Tensor,
    state: SamplingRows,
    steps: SampleSteps,
    *,
    workspace: SampleWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token for each row of logits; see `sample_rows_ref`. Two launches, three if random, nine to filter.

    Token ids are those of the reference, but where two race times, or a mass and the border of top_p or min_p, are
    within 1e-5 of each other, relative: `exp` is the device's own.
    """
    num_rows, vocab_size = logits.shape
    if not _triton.on_triton(logits) or vocab_size > 2**ID_BITS:
        return sample_rows_ref(logits, positions, rows, state, steps, out=out)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if workspace is None:
        workspace = SampleWorkspace(num_rows, vocab_size, device=logits.device)
    _check(logits, positions, rows, state, steps, workspace, out)
    if num_rows == 0:
        return out
    filters = steps.random and (steps.top_k or steps.top_p)
    block, num_warps, registers = _stretch(num_rows)
    num_chunks, pdl = triton.cdiv(vocab_size, block), _triton.has_pdl(logits.device)
    grid = num_chunks, num_rows
    inputs = logits, logits.stride(0), rows, positions, vocab_size, num_chunks
    numbers = state.reals, state.integers
    lists = state.bias_ids, state.biases, state.banned_ids, state.is_banned.view(torch.uint8)
    counts: tuple[Tensor | None, Tensor | None] = (None, None)
    if state.in_prompt is not None and steps.penalties:
        counts = state.in_prompt.view(torch.uint8), state.output_counts
    held, race = workspace, (workspace.race_values, workspace.race_ids)
    launch = {"num_warps": num_warps, "enable_fp_fusion": False, "launch_pdl": pdl}
    common = {
        "BLOCK": block, "WIDTH": state.biases.shape[1] if steps.biases else 0,
        "BANS": state.is_banned.shape[1] if steps.bans else 0, "PENALTIES": steps.penalties, "PDL": pdl,
        "maxnreg": registers, **launch,
    }  # fmt: skip
    chunks = {"CHUNKS": triton.next_power_of_2(num_chunks)}
    scan_kernel[grid](
        *inputs, *numbers, *lists, *counts, held.values, held.ids, held.lows, held.maxima, held.histogram, held.sums,
        FILTERS=filters, **common,
    )  # fmt: skip
    # A program that leaves at once, since its row is done, is cheaper than many.
    some = min(num_chunks, max(1, 3 * _triton.num_multiprocessors(logits.device) // num_rows)), num_rows
    if filters:
        which = {"TOP_K": steps.top_k, "TOP_P": steps.top_p}
        collected = *inputs, *numbers, *lists, *counts, held.values, held.lows, held.sums, held.listed
        num_groups = num_chunks * block // GROUP
        few = {"FEW": FEW, **which}
        least_kernel[(num_rows,)](
            *inputs[:-1], num_groups, *numbers, *lists, *counts, held.maxima, held.sums, held.listed,
            GROUPS=triton.next_power_of_2(num_groups), CAPACITY=CAPACITY, **few,
            **{name: value for name, value in common.items() if name != "BLOCK"} | {"num_warps": 8, "maxnreg": 128},
        )  # fmt: skip
        collect_kernel[some](*collected, CAPACITY=CAPACITY, BY_BINS=False, **chunks, **which, **common)
        count_kernel[some](
            *inputs, *numbers, *lists, *counts, held.values, held.lows, held.histogram, held.sums,
            **chunks, **few, **common,
        )  # fmt: skip
        plan_kernel[(num_rows,)](
            rows, vocab_size, num_chunks, *numbers, held.values, held.lows, held.histogram, held.sums,
            PDL=pdl, **chunks, **few, **(launch | {"num_warps": 4}),
        )  # fmt: skip
        collect_kernel[some](*collected, CAPACITY=CAPACITY, BY_BINS=True, **chunks, **which, **common)
        resolve_kernel[(num_rows,)](
            *collected, CAPACITY=CAPACITY, MIN_P=steps.min_p, **chunks, **few,
            **(common | {"BLOCK": 2048, "num_warps": 16, "maxnreg": 128}),
        )  # fmt: skip
    if steps.random:
        race_kernel[some](
            *inputs, *numbers, *lists, *counts, held.values, held.sums, *race, FILTERS=filters, MIN_P=steps.min_p,
            **chunks, **common,
        )  # fmt: skip
    choose_kernel[(num_rows,)](
        rows, vocab_size, num_chunks, state.reals, state.output_counts if steps.penalties else None,
        held.values, held.ids, held.sums, *race, out,
        **chunks, PENALTIES=steps.penalties, RANDOM=steps.random, FILTERS=filters, PDL=pdl,
        **(launch | {"num_warps": 1}),
    )  # fmt: skip
    return out


def _stretch(num_rows: int) -> tuple[int, int, int]:
    """Ids that a program looks at, its warps, and registers of a thread."""
    return (_LEAST_BLOCK, 4, 128) if num_rows <= 4 else (_MOST_BLOCK, 8, 80)


def _check(
    logits: Tensor,
    positions: Tensor,
    rows: Tensor,
    state: SamplingRows,
    steps: SampleSteps,
    workspace: SampleWorkspace,
    out: Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 or vocab_size == 1, "the logits of a row must be contiguous"
    for name, tensor in (("positions", positions), ("rows", rows), ("out", out)):
        assert tensor.shape == (num_rows,), f"{name} needs one element for each of {num_rows} rows"
        assert tensor.dtype == torch.int64, f"{name} must be int64"
        assert tensor.is_contiguous(), f"{name} must be contiguous"
    assert all(tensor.is_contiguous() for tensor in state.tensors()), "the state of the rows must be contiguous"
    assert state.reals.shape[1] == 6, f"a row has six reals, not {state.reals.shape[1]}"
    assert state.integers.shape[1] == 4, f"a row has four integers, not {state.integers.shape[1]}"
    assert state.reals.dtype == state.biases.dtype == torch.float32, "reals and biases are float32"
    for width in (state.biases.shape[1], state.is_banned.shape[1]):
        assert width & (width - 1) == 0, f"a list's width must be a power of two, not {width}"
    if steps.penalties:
        assert state.in_prompt is not None, "penalties stand on token counts"
        assert state.output_counts is not None, "penalties stand on token counts"
        assert state.output_counts.shape[1] == state.in_prompt.shape[1] == vocab_size, "one count for each token"
    assert workspace.vocab_size >= vocab_size, f"the workspace is for {workspace.vocab_size} tokens, not {vocab_size}"
    assert workspace.max_num_rows >= num_rows, f"the workspace is for {workspace.max_num_rows} rows, not {num_rows}"
