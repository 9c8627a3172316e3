"""The decoder, top-down: preamble, blocks, head.

Each is a callable over explicit tensors, so that a step can be cut and recorded between any two of them, and between
any two layers.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import (
    attention_prefill,
    embedding,
    linear,
    rotary_attention_decode,
    rotary_kv_write,
    rotary_rows,
    slot_mapping,
)
from .config import ModelConfig
from .kv_cache import KVCache
from .rotary import rotary_tables


@dataclass(frozen=True)
class AttentionMetadata:
    """What attention needs to know of the batch, beside q, k and v.

    Attributes:
        block_tables: `[num_seqs, max_blocks_per_seq]` int32, KV blocks of each sequence.
        seq_lens: `[num_seqs]` int32, keys visible to each sequence, the new ones included.
        cu_seqlens_q: `[num_seqs + 1]` int32, query offsets; None when every sequence has exactly one query (decode).
    """

    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None = None


class Preamble(NamedTuple):
    """What the preamble hands to the blocks.

    `hidden` is `[num_tokens, hidden_size]`, `cos` and `sin` are `[num_tokens, rotary_dim / 2]` float32, and
    `slot_mapping` is `[num_tokens]` int64.
    """

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    slot_mapping: Tensor


class Decoder(nn.Module):
    """A Llama-style decoder over a paged KV cache. Parameters are uninitialised until a loader fills them.

    A step is `preamble`, `blocks` (any number of consecutive layer ranges), `head`:

        pre = decoder.preamble(token_ids, positions, metadata, kv_cache.block_size)
        hidden = decoder.blocks(pre.hidden, pre, metadata, kv_cache)
        logits = decoder.head(hidden)
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.embed_weight = _parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(Layer(config, dtype=dtype, device=device) for _ in range(config.num_layers))
        self.norm_weight = _parameter(config.hidden_size, dtype=dtype, device=device)
        if not config.tie_embeddings:
            self.head_weight = _parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        # Plain attributes and not buffers: a cast of the module must leave them in float32.
        self.cos, self.sin = rotary_tables(config.rotary, config.max_position, device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    def preamble(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        *,
        out: Preamble | None = None,
    ) -> Preamble:
        """From packed tokens to the inputs of the first layer.

        A position past `config.max_position` is served, with the rotation of the last one: a decode that runs ahead of
        the host may overshoot by a few tokens, which are dropped, as are their keys where no block is left.

        Args:
            token_ids, positions: `[num_tokens]` int64.
            metadata: the batch.
            block_size: tokens a KV block holds.
            out: buffers that the results are written to.
        """
        hidden, slots = (out.hidden, out.slot_mapping) if out is not None else (None, None)
        return Preamble(
            embedding(token_ids, self.embed_weight, out=hidden),
            *rotary_rows(positions, self.cos, self.sin, out=(out.cos, out.sin) if out is not None else None),
            slot_mapping(positions, metadata.block_tables, block_size, cu_seqlens_q=metadata.cu_seqlens_q, out=slots),
        )

    def blocks(
        self,
        hidden: Tensor,
        preamble: Preamble,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        start: int = 0,
        stop: int | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Layers `start .. stop - 1`: `[num_tokens, hidden_size]` in and out; their K and V are written to the cache.

        `hidden` is read only; `out`, when given, receives the result and must not be `hidden`.
        """
        stop = self.config.num_layers if stop is None else stop
        assert 0 <= start < stop <= self.config.num_layers, "a range of layers must hold at least one existing layer"
        for index in range(start, stop):
            layer = self.layers[index]
            assert isinstance(layer, Layer), "the module list holds the decoder's layers"
            last = out if index == stop - 1 else None
            hidden = layer(hidden, preamble, metadata, kv_cache.k[index], kv_cache.v[index], out=last)
        return hidden

    def head(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Logits `[num_tokens, vocab_size]` in the dtype of the model: final norm, then projection."""
        weight = self.embed_weight if self.config.tie_embeddings else self.head_weight
        return linear(hidden, weight, norm_weight=self.norm_weight, norm_eps=self.config.norm_eps, out=out)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream `hidden`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config

        new = partial(_parameter, dtype=dtype, device=device)
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, qkv_size = config.num_heads * head_dim, (config.num_heads + 2 * config.num_kv_heads) * head_dim
        self.input_norm_weight = new(hidden)
        self.qkv_weight = new(qkv_size, hidden)
        self.qkv_bias = new(qkv_size) if config.attention_bias else None
        self.q_norm_weight = new(head_dim) if config.qk_norm else None
        self.k_norm_weight = new(head_dim) if config.qk_norm else None
        self.o_weight = new(hidden, q_size)
        self.o_bias = new(hidden) if config.attention_bias else None
        self.post_norm_weight = new(hidden)
        self.gate_up_weight = new(2 * inner, hidden)
        self.gate_up_bias = new(2 * inner) if config.mlp_bias else None
        self.down_weight = new(hidden, inner)
        self.down_bias = new(hidden) if config.mlp_bias else None

    def forward(
        self,
        hidden: Tensor,
        preamble: Preamble,
        metadata: AttentionMetadata,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        eps = self.config.norm_eps
        qkv = linear(hidden, self.qkv_weight, self.qkv_bias, norm_weight=self.input_norm_weight, norm_eps=eps)
        context = self._attend(qkv, preamble, metadata, k_cache, v_cache).flatten(1)
        hidden = linear(context, self.o_weight, self.o_bias, residual=hidden)
        inner = linear(
            hidden, self.gate_up_weight, self.gate_up_bias, norm_weight=self.post_norm_weight, norm_eps=eps, swiglu=True
        )
        return linear(inner, self.down_weight, self.down_bias, residual=hidden, out=out)

    def _attend(
        self, qkv: Tensor, preamble: Preamble, metadata: AttentionMetadata, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        scale, window = self.config.head_dim**-0.5, self.config.sliding_window
        tables, lens, offsets = metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q
        inputs = (qkv, preamble.cos, preamble.sin, preamble.slot_mapping, k_cache, v_cache)
        norms: dict[str, Any] = {
            "q_norm_weight": self.q_norm_weight,
            "k_norm_weight": self.k_norm_weight,
            "norm_eps": self.config.norm_eps,
        }
        if offsets is None:
            return rotary_attention_decode(*inputs, tables, lens, scale, window=window, **norms)
        q = rotary_kv_write(*inputs, **norms)
        return attention_prefill(q, k_cache, v_cache, tables, lens, offsets, scale, window=window)


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
