"""A prompt of one sequence as one forward over static inputs: from its tokens to the logits behind the last of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..model import AttentionMetadata
from .decode_pieces import DecodePieces
from .dummy_rows import RowInputs
from .graph_buckets import BucketKey, CudaGraphConfig
from .static_buffers import StaticBuffers

PROMPT_WALK = "prefill"

NUMBERS, LOGITS = "prompt.numbers", "prompt.logits"
_HEAD = 8
"""Numbers in front of the token ids: the two query offsets, and from `_LENGTH` on the length, which is the second of
them. Kernels ask for addresses that are multiples of 16 bytes, and are compiled anew for others."""
_LENGTH = 4


def prompt_config(sizes: Sequence[int]) -> CudaGraphConfig:
    """The buckets of prompts. Longer ones, and several at a time, run eagerly."""
    return CudaGraphConfig(PROMPT_WALK, (1,), tokens_per_row=None, token_buckets=tuple(sizes), caps_batch_size=False)


def num_columns(key: BucketKey, block_size: int) -> int:
    """Columns of the block table: a prompt starts at position 0, so that its bucket bounds its length."""
    return -(-key.num_tokens // block_size)


def prompt_inputs(
    key: BucketKey, token_ids: Sequence[int], blocks: Sequence[int], block_size: int
) -> dict[str, Tensor]:
    """All that the host has to tell of a prompt, in one tensor, so that it takes one copy.

    Args:
        blocks: of the sequence, at least as many as its tokens fill; those that a bucket has beyond are never visible.
    """
    length, columns = len(token_ids), num_columns(key, block_size)
    numbers = [0, length, 0, 0, length, 0, 0, 0, *token_ids, *[0] * (key.num_tokens - length), *blocks[:columns]]
    return {"numbers": torch.tensor(numbers, dtype=torch.int32)}


class WholePrompt:
    """What a `CudaGraphRunner` captures of prompts. Tokens of the padding write to the sink and attend to nothing."""

    def __init__(self, pieces: DecodePieces, buffers: StaticBuffers, sizes: Sequence[int]) -> None:
        self._pieces = pieces
        self._buffers = buffers
        self._config = prompt_config(sizes)

    def graph_configs(self) -> list[CudaGraphConfig]:
        return [self._config]

    def claim(self, configs: Sequence[CudaGraphConfig]) -> None:
        model = self._pieces.model
        most = max(self._num_numbers(key) for config in configs for key in config.bucket_keys())
        self._buffers.claim(NUMBERS, most, (), torch.int32)
        self._buffers.claim(LOGITS, 1, (model.config.vocab_size,), model.dtype)

    def static_inputs(self, key: BucketKey) -> dict[str, Tensor]:
        return {"numbers": self._buffers.get(NUMBERS, self._num_numbers(key))}

    def prepare_inputs(self, key: BucketKey) -> None:
        """A prompt without a token: all are padding."""
        self.static_inputs(key)["numbers"].zero_()

    def template_row(self, config: CudaGraphConfig, rid: int) -> RowInputs:
        return RowInputs(rid, max(config.token_buckets), {})

    def forward(self, key: BucketKey, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        model, kv_cache, size = self._pieces.model, self._pieces.kv_cache, key.num_tokens
        head, token_ids, table = inputs["numbers"].split((_HEAD, size, num_columns(key, kv_cache.block_size)))
        length = head[_LENGTH : _LENGTH + 1]
        metadata = AttentionMetadata(table[None], length, cu_seqlens_q=head[:2])
        positions = torch.arange(size, device=token_ids.device)
        preamble = model.preamble(token_ids.to(torch.int64), positions, metadata, kv_cache.block_size)
        hidden = model.blocks(preamble.hidden, preamble, metadata, kv_cache)
        last = hidden.index_select(0, (length - 1).clamp_(min=0))
        return {"logits": model.head(last, out=self._buffers.get(LOGITS, 1))}

    def _num_numbers(self, key: BucketKey) -> int:
        return _HEAD + key.num_tokens + num_columns(key, self._pieces.kv_cache.block_size)
