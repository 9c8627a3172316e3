"""The decoder, top-down: preamble, blocks, head.

Each is a callable over explicit tensors, so that a step can be cut and recorded between any two of them, and between
any two layers.
"""

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import (
    attention_prefill,
    embedding,
    linear,
    residual_add,
    rms_norm,
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

    What the families of `model/families.py` do differently are numbers and switches of the config.

    A step is `preamble`, `blocks` (any number of consecutive layer ranges), `head`:

        pre = decoder.preamble(token_ids, positions, metadata, kv_cache.block_size)
        hidden = decoder.blocks(pre.hidden, pre, metadata, kv_cache)
        logits = decoder.head(hidden)

    Args:
        context: tokens that the longest sequence will have; None, and at most: `config.max_position`.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, context: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_weight = _parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            Layer(config, index, dtype=dtype, device=device) for index in range(config.num_layers)
        )
        self.norm_weight = _parameter(config.hidden_size, dtype=dtype, device=device)
        if not config.tie_embeddings:
            self.head_weight = _parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        # Plain attributes and not buffers: a cast of the module must leave them in float32.
        self.cos, self.sin = rotary_tables(
            config.rotary, min(context or config.max_position, config.max_position), device
        )

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

        A position past the context is served, with the rotation of the last one: a decode that runs ahead of
        the host may overshoot by a few tokens, which are dropped, as are their keys where no block is left.

        Args:
            token_ids, positions: `[num_tokens]` int64.
            metadata: the batch.
            block_size: tokens a KV block holds.
            out: buffers that the results are written to.
        """
        hidden, slots = (out.hidden, out.slot_mapping) if out is not None else (None, None)
        return Preamble(
            embedding(token_ids, self.embed_weight, scale=self.config.embedding_multiplier, out=hidden),
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

        `hidden` is read only; `out`, when given, receives the result and must not be `hidden`. From the first layer on
        the residual stream stays in one buffer.
        """
        stop = self.config.num_layers if stop is None else stop
        assert 0 <= start < stop <= self.config.num_layers, "a range of layers must hold at least one existing layer"
        for index, layer in enumerate(islice(self.layers, start, stop), start):
            assert isinstance(layer, Layer), "the module list holds the decoder's layers"
            stream = out if out is not None and index == stop - 1 else hidden if index > start else None
            hidden = layer(hidden, preamble, metadata, kv_cache.k[index], kv_cache.v[index], out=stream)
        return hidden

    def head(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Logits `[num_tokens, vocab_size]` in the dtype of the model: final norm, then projection."""
        weight = self.embed_weight if self.config.tie_embeddings else self.head_weight
        logits = linear(hidden, weight, norm_weight=self.norm_weight, norm_eps=self.config.norm_eps, out=out)
        return logits if self.config.logits_divisor == 1.0 else logits.div_(self.config.logits_divisor)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm (or with one behind) and added to the residual stream `hidden`."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.window = config.window_of(index)
        self.is_rotated = index not in config.unrotated_layers

        new = partial(_parameter, dtype=dtype, device=device)
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv_size, (q_norm, k_norm) = config.q_size + 2 * config.kv_size, config.qk_norm_sizes
        before, after = (0, hidden) if config.post_norms else (hidden, 0)
        self.input_norm_weight = new(before) if before else None
        self.qkv_weight = new(qkv_size, hidden)
        self.qkv_bias = new(qkv_size) if config.attention_bias else None
        self.q_norm_weight = new(q_norm) if q_norm else None
        self.k_norm_weight = new(k_norm) if k_norm else None
        self.o_weight = new(hidden, config.q_size)
        self.o_bias = new(hidden) if config.output_bias else None
        self.o_norm_weight = new(after) if after else None
        self.post_norm_weight = new(before) if before else None
        self.gate_up_weight = new(2 * inner, hidden)
        self.gate_up_bias = new(2 * inner) if config.mlp_bias else None
        self.down_weight = new(hidden, inner)
        self.down_bias = new(hidden) if config.mlp_bias else None
        self.down_norm_weight = new(after) if after else None

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
        """`out` receives the result, and may be `hidden` itself: cuBLAS adds to what lies in its result's place, and
        would have a residual from elsewhere copied there first."""
        qkv = self.project_qkv(hidden)
        context = self.attend(qkv, preamble, metadata, k_cache, v_cache)
        hidden = self.add_attention(context, hidden, out)
        return self.add_mlp(self.project_gate_up(hidden), hidden, hidden)

    def project_qkv(self, hidden: Tensor) -> Tensor:
        eps = self.config.norm_eps
        return linear(hidden, self.qkv_weight, self.qkv_bias, norm_weight=self.input_norm_weight, norm_eps=eps)

    def add_attention(self, context: Tensor, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._add(context, self.o_weight, self.o_bias, self.o_norm_weight, hidden, out)

    def project_gate_up(self, hidden: Tensor) -> Tensor:
        """SwiGLU included."""
        eps = self.config.norm_eps
        return linear(
            hidden, self.gate_up_weight, self.gate_up_bias, norm_weight=self.post_norm_weight, norm_eps=eps, swiglu=True
        )

    def add_mlp(self, inner: Tensor, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._add(inner, self.down_weight, self.down_bias, self.down_norm_weight, hidden, out)

    def _add(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        residual: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """The projection of `x`, normed and scaled where the family does that, added to `residual`."""
        scale = self.config.residual_multiplier
        if norm_weight is None and scale == 1.0:
            return linear(x, weight, bias, residual=residual, out=out)
        return residual_add(
            linear(x, weight, bias),
            residual,
            scale=scale,
            norm_weight=norm_weight,
            norm_eps=self.config.norm_eps,
            out=out,
        )

    def attend(
        self, qkv: Tensor, preamble: Preamble, metadata: AttentionMetadata, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Rotation, KV write and attention: `[num_tokens, q_size]`."""
        config, cos, sin = self.config, preamble.cos, preamble.sin
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        if not self.is_rotated:
            cos, sin = cos[:, :0], sin[:, :0]
        norms: dict[str, Any] = {}
        if config.qk_norm == "head":
            norms = {
                "q_norm_weight": self.q_norm_weight,
                "k_norm_weight": self.k_norm_weight,
                "norm_eps": config.norm_eps,
            }
        elif self.q_norm_weight is not None and self.k_norm_weight is not None:
            q, k, _ = qkv.split((config.q_size, config.kv_size, config.kv_size), 1)
            rms_norm(q, self.q_norm_weight, config.norm_eps, out=q)
            rms_norm(k, self.k_norm_weight, config.norm_eps, out=k)
        tables, lens, offsets = metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q
        inputs = (qkv, cos, sin, preamble.slot_mapping, k_cache, v_cache)
        if offsets is None:
            return rotary_attention_decode(*inputs, tables, lens, scale, window=self.window, **norms).flatten(1)
        q = rotary_kv_write(*inputs, **norms)
        return attention_prefill(q, k_cache, v_cache, tables, lens, offsets, scale, window=self.window).flatten(1)


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
