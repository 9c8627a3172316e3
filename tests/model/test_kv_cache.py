import pytest
import torch

from ostinato.kernels import SINK_BLOCK
from ostinato.model import KVCache, ModelConfig

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 12,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
    }
)


def test_one_pair_of_caches_per_layer_with_a_clean_sink() -> None:
    cache = KVCache.allocate(CONFIG, 5, 4, dtype=torch.bfloat16, device="cpu")
    assert len(cache.k) == len(cache.v) == 3
    assert (cache.num_blocks, cache.block_size) == (5, 4)
    tensors = [*cache.k, *cache.v]
    assert all(tensor.shape == (5, 2, 4, 10) and tensor.dtype == torch.bfloat16 for tensor in tensors)
    assert all((tensor[SINK_BLOCK] == 0).all() for tensor in tensors)
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    assert sum(t.nbytes for t in tensors) == 5 * 4 * CONFIG.kv_bytes_per_token(torch.bfloat16)


def test_the_reserved_blocks_are_part_of_every_cache() -> None:
    with pytest.raises(AssertionError, match="reserved"):
        KVCache.allocate(CONFIG, 1, 4, dtype=torch.float32, device="cpu")
