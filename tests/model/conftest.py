"""What the model tests share: small random decoders, and a player that runs tokens through one as an engine would."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import FIRST_BLOCK, SINK_BLOCK, rotary_rows
from ostinato.model import AttentionMetadata, Decoder, KVCache, ModelConfig, RotaryConfig


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are small, and threads that wait for each other on a busy machine would take most of the time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def random_decoder() -> Callable[..., Decoder]:
    """`random_decoder(dtype, device, **fields of ModelConfig)`: three layers, odd sizes, norms and biases of size 1."""

    def make(dtype: torch.dtype = torch.float32, device: str = "cpu", **fields: Any) -> Decoder:
        head_dim = fields.get("head_dim", 10)
        config = ModelConfig(
            **{
                "architecture": "llama",
                "vocab_size": 50,
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_layers": 3,
                "num_heads": 6,
                "num_kv_heads": 2,
                "head_dim": head_dim,
                "norm_eps": 1e-5,
                "rotary": RotaryConfig("default", 10000.0, head_dim),
                "max_position": 64,
                "attention_bias": True,
                "output_bias": True,
                "mlp_bias": True,
            }
            | fields
        )
        decoder = Decoder(config, dtype=dtype, device=device)
        generator = torch.Generator().manual_seed(1)
        for parameter in decoder.parameters():
            numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(numbers if parameter.dim() == 1 else numbers / parameter.shape[1] ** 0.5)
        return decoder

    return make


class Player:
    """Feeds new tokens of several sequences through a decoder, step by step, keeping their keys in a paged cache.

    The blocks of a sequence are neither in order nor side by side, and the cache is NaN wherever nobody wrote. Only the
    sink, like the engine's, starts as zeros; table entries past a sequence's blocks name it.

    Args:
        rotate_as: the position whose rotation the token at a position gets, instead of its own. A gap in it brings the
            distances of a long sequence to a short one.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_seqs: int,
        max_tokens: int,
        block_size: int,
        rotate_as: Callable[[int], int] | None = None,
    ) -> None:
        self.decoder, self.block_size, self.rotate_as = decoder, block_size, rotate_as
        columns = -(-max_tokens // block_size)
        num_blocks = FIRST_BLOCK + num_seqs * columns + 1
        self.cache = KVCache.allocate(
            decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=decoder.device
        )
        for cache in (*self.cache.k, *self.cache.v):
            cache.fill_(float("nan"))
            cache[SINK_BLOCK] = 0.0
        order = torch.randperm(num_blocks - FIRST_BLOCK - 1, generator=torch.Generator().manual_seed(2)) + FIRST_BLOCK
        spare = torch.full((num_seqs, 1), SINK_BLOCK)
        self.tables = torch.cat((order.view(num_seqs, columns), spare), 1).to(decoder.device, torch.int32)
        self.lengths = [0] * num_seqs

    def metadata(self, counts: Sequence[int] | None) -> AttentionMetadata:
        """Of the current lengths; `counts` are the new tokens of each sequence in a prefill, None for a decode."""
        lens = torch.tensor(self.lengths, dtype=torch.int32, device=self.decoder.device)
        offsets = None if counts is None else torch.tensor([0, *counts]).cumsum(0).to(self.decoder.device, torch.int32)
        return AttentionMetadata(self.tables, lens, offsets)

    def prefill(self, chunks: Sequence[Sequence[int]]) -> list[Tensor]:
        """The next tokens of each sequence, maybe none; returns the logits `[len(chunk), vocab_size]` of each."""
        positions = [n + i for n, chunk in zip(self.lengths, chunks, strict=True) for i in range(len(chunk))]
        counts = [len(chunk) for chunk in chunks]
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        ids = [token_id for chunk in chunks for token_id in chunk]
        return list(self._run(ids, positions, self.metadata(counts)).split(counts))

    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """One token of each sequence; returns `[num_seqs, vocab_size]`."""
        positions = list(self.lengths)
        self.lengths = [n + 1 for n in self.lengths]
        return self._run(list(token_ids), positions, self.metadata(None))

    def _run(self, token_ids: list[int], positions: list[int], metadata: AttentionMetadata) -> Tensor:
        ids, at = (torch.tensor(numbers, device=self.decoder.device) for numbers in (token_ids, positions))
        preamble = self.decoder.preamble(ids, at, metadata, self.block_size)
        if self.rotate_as is not None:
            moved = torch.tensor([self.rotate_as(position) for position in positions], device=self.decoder.device)
            cos, sin = rotary_rows(moved, self.decoder.cos, self.decoder.sin)
            preamble = preamble._replace(cos=cos, sin=sin)
        return self.decoder.head(self.decoder.blocks(preamble.hidden, preamble, metadata, self.cache))


@pytest.fixture
def player() -> type[Player]:
    return Player


@pytest.fixture
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """`‖actual - expected‖ / ‖expected‖`, in float64."""

    def measure(actual: Tensor, expected: Tensor) -> float:
        assert actual.shape == expected.shape
        expected = expected.detach().cpu().double()
        return ((actual.detach().cpu().double() - expected).norm() / expected.norm()).item()

    return measure
