"""A decode step in torch alone, products by cuBLAS and attention by SDPA over a dense cache, recorded as one graph."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model import Decoder
from ..model.decoder import Layer
from .peer_work import Work, timed
from .timing import capture


class TorchModel:
    """What a careful user writes without kernels of their own.

    Raises:
        ValueError: a model that is more than a plain Llama.
    """

    version = str(torch.__version__)

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        if config.architecture != "llama" or config.attention_bias or config.mlp_bias:
            raise ValueError(f"the torch baseline is a Llama without biases, not {config.architecture}")

    def at(self, work: Work) -> "TorchPeer":
        return TorchPeer(work)


class TorchPeer:
    """All rows stand at one position, which is on the device."""

    def __init__(self, work: Work) -> None:
        self._decoder = decoder = work.decoder
        config, length = decoder.config, work.context + work.room
        self._subject = work.subject
        self._token_ids = work.token_ids().flatten()
        self._position = torch.full((1,), work.context, device=decoder.device)
        self._places = torch.arange(length, device=decoder.device)
        shape = (work.batch, config.num_kv_heads, length, config.head_dim)
        self._caches: list[tuple[Tensor, Tensor]] = []
        for layer in range(config.num_layers):
            pair = tuple(torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in range(2))
            for cache, start in zip(pair, work.keys_values(layer), strict=True):
                cache[:, :, : work.context] = start
            self._caches.append((pair[0], pair[1]))
        start_ids = self._token_ids.clone()
        self._graph = capture(self._step, decoder.device)
        self._token_ids.copy_(start_ids)
        self._position.fill_(work.context)
        self._first: list[int] | None = None

    def run(self, count: int) -> float:
        if self._first is None:
            self._graph.replay()
            self._first = self._token_ids.tolist()
            count -= 1
        return timed(self._graph.replay, count, self._subject.wait)

    def first_tokens(self) -> list[int] | None:
        return self._first

    def _step(self) -> None:
        decoder, config = self._decoder, self._decoder.config
        cos, sin = (table.index_select(0, self._position) for table in (decoder.cos, decoder.sin))
        mask = (self._places <= self._position)[None, None, None]
        hidden = F.embedding(self._token_ids, decoder.embed_weight)
        for layer, (k_cache, v_cache) in zip(decoder.layers, self._caches, strict=True):
            assert isinstance(layer, Layer), "the module list holds the decoder's layers"
            qkv = F.linear(self._norm(hidden, layer.input_norm_weight), layer.qkv_weight)
            q, k, v = (
                part.unflatten(1, (-1, config.head_dim))
                for part in qkv.split((config.q_size, config.kv_size, config.kv_size), 1)
            )
            k_cache.index_copy_(2, self._position, _rotated(k, cos, sin).unsqueeze(2))
            v_cache.index_copy_(2, self._position, v.unsqueeze(2))
            # Query heads of one KV head stand where queries stand, so that its keys are read once.
            grouped = _rotated(q, cos, sin).unflatten(1, (config.num_kv_heads, -1))
            attended = F.scaled_dot_product_attention(grouped, k_cache, v_cache, attn_mask=mask)
            hidden = hidden + F.linear(attended.flatten(1), layer.o_weight)
            gate, up = F.linear(self._norm(hidden, layer.post_norm_weight), layer.gate_up_weight).chunk(2, 1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down_weight)
        head = decoder.embed_weight if config.tie_embeddings else decoder.head_weight
        self._token_ids.copy_(F.linear(self._norm(hidden, decoder.norm_weight), head).argmax(1))
        self._position.add_(1)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._decoder.config.norm_eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
