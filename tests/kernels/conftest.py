"""What the kernel tests share: the dtypes, the two devices, a paged cache full of poison, and slow exact attention."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are small, and threads that wait for each other on a busy machine would take most of the time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def assert_near() -> Callable[..., None]:
    """`assert_near(actual, exact, ulps)`: no element is further off than `ulps` roundings of the largest magnitude.

    `exact` is float64, computed from the very inputs (already rounded to their dtype) that the operation got.
    """

    def check(actual: Tensor, exact: Tensor, ulps: float) -> None:
        assert actual.shape == exact.shape
        assert actual.isfinite().all()
        error = (actual.cpu().double() - exact).abs().max().item() if exact.numel() else 0.0
        magnitude = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
        assert error <= ulps * torch.finfo(actual.dtype).eps * magnitude

    return check


@dataclass(frozen=True)
class Paged:
    """A batch's keys and values in a cache, beside what `attention_*` needs to find them."""

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_cache, self.v_cache, self.block_tables, self.seq_lens


@pytest.fixture
def paged() -> Callable[..., Paged]:
    """Scatters dense keys and values, one `[length, num_kv_heads, head_dim]` a sequence, over a shuffled paged cache.

    Every other element of the cache is `poison`, and the table entries past a sequence's own blocks name blocks of
    nothing but poison, the reserved block 0 among them.
    """

    def make(
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        block_size: int,
        *,
        poison: float = float("nan"),
        spare_columns: int = 2,
        seed: int = 0,
    ) -> Paged:
        dtype, device = keys[0].dtype, keys[0].device
        counts = [-(-len(k) // block_size) for k in keys]
        num_blocks = 2 + sum(counts) + 1
        order = (torch.randperm(num_blocks - 2, generator=torch.Generator().manual_seed(seed)) + 2).tolist()
        poisoned = [0, order.pop()]
        shape = (num_blocks, *keys[0].shape[1:])
        k_cache = torch.full((shape[0], shape[1], block_size, shape[2]), poison, dtype=dtype, device=device)
        v_cache = k_cache.clone()
        width = max(counts) + spare_columns
        tables = torch.tensor([[poisoned[(i + j) % 2] for j in range(width)] for i in range(len(keys))])
        for seq, count in enumerate(counts):
            for column in range(count):
                block = tables[seq, column] = order.pop()
                for cache, dense in ((k_cache, keys[seq]), (v_cache, values[seq])):
                    part = dense[column * block_size : (column + 1) * block_size]
                    cache[block, :, : len(part)] = part.transpose(0, 1)
        lengths = torch.tensor([len(k) for k in keys], dtype=torch.int32, device=device)
        return Paged(k_cache, v_cache, tables.to(torch.int32).to(device), lengths)

    return make


@pytest.fixture
def exact_attention() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """One query `[num_heads, head_dim]` over the keys that it sees `[n, num_kv_heads, head_dim]`; float64, by heads."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        q, keys, values = q.cpu().double(), keys.cpu().double(), values.cpu().double()
        num_heads, num_kv_heads = q.shape[0], keys.shape[1]
        result = torch.zeros_like(q)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores = scale * (keys[:, kv_head] @ q[head])
            weights = (scores - scores.max()).exp()
            result[head] = weights @ values[:, kv_head] / weights.sum()
        return result

    return attend
