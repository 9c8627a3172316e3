"""Log-probabilities of the model's own distribution."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._sample_values import GROUP, ID_BITS, ids_of_keys, ordering_keys, values_of_keys, wide_load
from ._triton import tl, triton
from .ordering import ordering_keys_ref

MOST_TOP = 32  # most probable tokens that the kernels find
_BLOCK = 4096


class LogprobsWorkspace:
    """What the kernels keep between their launches: 16 KB a row at a vocabulary of 128k. Its content is no one's."""

    def __init__(self, max_num_rows: int, vocab_size: int, *, device: torch.device | str) -> None:
        self.max_num_rows, self.vocab_size = max_num_rows, vocab_size
        num_chunks = -(-vocab_size // _BLOCK)
        self.largest = torch.empty(max_num_rows * num_chunks, dtype=torch.float32, device=device)
        self.sums = torch.empty(max_num_rows * num_chunks, dtype=torch.float32, device=device)
        self.keys = torch.empty(max_num_rows * num_chunks * _BLOCK // GROUP, dtype=torch.int64, device=device)


def logprobs_ref(
    logits: Tensor,
    token_ids: Tensor,
    k: int,
    *,
    workspace: LogprobsWorkspace | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of one given token a row, and the k most probable tokens with theirs.

    The k are ordered by larger logit, then lower id: a shorter list is a prefix of a longer one, and the first id is
    the greedy token. NaN counts as -inf in that order, and makes every log-probability of its row NaN.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype, as the model gave them: no penalty, temperature or filter.
        token_ids: `[num_rows]` int64.
        k: a k above vocab_size gives the whole vocabulary.
        workspace: for the kernels; the reference needs none.
        out: tensors for the results, written and returned when given.

    Returns:
        `[num_rows]` float32, `[num_rows, k]` int64 and `[num_rows, k]` float32.
    """
    log_softmax = torch.log_softmax(logits.float(), dim=-1)
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    top_ids = ordering_keys_ref(values).topk(min(k, logits.shape[-1])).indices
    results = log_softmax.gather(1, token_ids[:, None]).squeeze(1), top_ids, log_softmax.gather(1, top_ids)
    if out is None:
        return results
    for destination, result in zip(out, results, strict=True):
        destination.copy_(result)
    return out


@triton.jit
@no_type_check
def _keys(values, ids, vocab_size):
    """Keys that sort as `ordering_keys_ref` does; what is outside the vocabulary is below all that is inside."""
    values = tl.where(values == values, values, float("-inf"))
    return tl.where(ids < vocab_size, ordering_keys(values, ids), -562949953421312)


@triton.jit
@no_type_check
def _first_keys(keys, k, MOST: tl.constexpr):
    """The k largest of different keys, largest first, in a list of MOST whose rest is key 0: the last id."""
    place = tl.arange(0, MOST)
    first = tl.zeros((MOST,), tl.int64)
    for i in range(0, k):
        largest = tl.max(keys, 0)
        first = tl.where(place == i, largest, first)
        keys = tl.where(keys == largest, -562949953421312, keys)
    return first


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def _logprobs_chunks_kernel(
    logits_ptr, stride, vocab_size, num_chunks, largest_ptr, sums_ptr, keys_ptr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program sums the exponentials of BLOCK ids of one row, and finds the first of every GROUP of them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    values = wide_load(logits_ptr + row * stride, chunk * BLOCK, vocab_size, BLOCK)
    largest = tl.maximum(tl.max(tl.where(values == values, values, float("-inf")), 0), -3.4028234663852886e38)
    tl.store(largest_ptr + row * num_chunks + chunk, largest)
    tl.store(sums_ptr + row * num_chunks + chunk, tl.sum(tl.exp(values - largest), 0))
    if TOP:
        firsts = tl.max(tl.reshape(_keys(values, ids, vocab_size), (BLOCK // GROUP, GROUP)), 1)
        tl.store(keys_ptr + (row * num_chunks + chunk) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), firsts)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "k"])
@no_type_check
def _logprobs_merge_kernel(
    logits_ptr, stride, vocab_size, num_chunks, largest_ptr, sums_ptr, keys_ptr, token_ids_ptr,
    out_ptr, top_ids_ptr, top_logprobs_ptr, k,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program does one row. Its k first tokens are in the k groups whose own first comes first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    maxima = tl.load(largest_ptr + row * num_chunks + chunk, mask=inside, other=-3.4028234663852886e38)
    sums = tl.load(sums_ptr + row * num_chunks + chunk, mask=inside, other=0.0)
    largest = tl.max(maxima, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp(maxima - largest), 0))
    logits_ptr += row * stride
    chosen = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(out_ptr + row, chosen - largest - log_sum)
    if TOP:
        group = tl.arange(0, CHUNKS * (BLOCK // GROUP))
        num_groups = num_chunks * (BLOCK // GROUP)
        firsts = tl.load(keys_ptr + row * num_groups + group, mask=group < num_groups, other=-562949953421312)
        groups = ids_of_keys(_first_keys(firsts, k, MOST)) // GROUP
        ids = tl.reshape(groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (MOST * GROUP,))
        values = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        first = _first_keys(_keys(values, ids, vocab_size), k, MOST)
        place = tl.arange(0, MOST)
        tl.store(top_ids_ptr + row * k + place, ids_of_keys(first).to(tl.int64), mask=place < k)
        tl.store(top_logprobs_ptr + row * k + place, values_of_keys(first) - largest - log_sum, mask=place < k)


def logprobs(
    logits: Tensor,
    token_ids: Tensor,
    k: int,
    *,
    workspace: LogprobsWorkspace | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of given and of the most probable tokens, in two launches; see `logprobs_ref`.

    A k above 32 and a vocabulary above 256k are the reference's.
    """
    num_rows, vocab_size = logits.shape
    k = min(k, vocab_size)
    if not _triton.on_triton(logits) or vocab_size > 2**ID_BITS or k > MOST_TOP:
        return logprobs_ref(logits, token_ids, k, out=out)
    device = logits.device
    if out is None:
        out = (
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.empty(num_rows, k, dtype=torch.int64, device=device),
            torch.empty(num_rows, k, dtype=torch.float32, device=device),
        )
    if workspace is None:
        workspace = LogprobsWorkspace(num_rows, vocab_size, device=device)
    assert logits.stride(1) == 1 or vocab_size == 1, "the logits of a row must be contiguous"
    assert token_ids.shape == (num_rows,), f"token_ids needs one id for each of {num_rows} rows"
    for tensor, shape, dtype in zip(
        (token_ids, *out),
        ((num_rows,), (num_rows,), (num_rows, k), (num_rows, k)),
        (torch.int64, torch.float32, torch.int64, torch.float32),
        strict=True,
    ):
        assert tensor.shape == shape, f"shape {tuple(tensor.shape)} should be {shape}"
        assert tensor.dtype == dtype, f"dtype {tensor.dtype} should be {dtype}"
        assert tensor.is_contiguous(), "token ids and results must be contiguous"
    assert workspace.vocab_size >= vocab_size, f"the workspace is for {workspace.vocab_size} tokens, not {vocab_size}"
    assert workspace.max_num_rows >= num_rows, f"the workspace is for {workspace.max_num_rows} rows, not {num_rows}"
    if num_rows == 0:
        return out
    num_chunks, pdl = triton.cdiv(vocab_size, _BLOCK), _triton.has_pdl(device)
    inputs = logits, logits.stride(0), vocab_size, num_chunks, workspace.largest, workspace.sums, workspace.keys
    common = {"BLOCK": _BLOCK, "GROUP": GROUP, "TOP": k > 0, "PDL": pdl, "num_warps": 8, "launch_pdl": pdl}
    _logprobs_chunks_kernel[(num_chunks, num_rows)](*inputs, **common)
    _logprobs_merge_kernel[(num_rows,)](
        *inputs, token_ids, *out, k, CHUNKS=triton.next_power_of_2(num_chunks), MOST=MOST_TOP, **common
    )
    return out
