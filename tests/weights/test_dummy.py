"""Random weights: repeatable, independent of each other, and of a size that a forward pass survives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato.model import AttentionMetadata, Decoder, KVCache, ModelConfig
from ostinato.weights import dummy_model

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@pytest.fixture
def config(tiny_config: Callable[..., dict[str, Any]]) -> ModelConfig:
    return ModelConfig.from_hf(
        tiny_config(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=12,
            attention_bias=True,
            mlp_bias=True,
        )
    )


@DTYPES
def test_every_parameter_is_finite_and_of_the_dtype(config: ModelConfig, dtype: torch.dtype) -> None:
    model = dummy_model(config, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@DTYPES
def test_repeatable_by_seed(config: ModelConfig, dtype: torch.dtype) -> None:
    first = dummy_model(config, dtype=dtype, seed=3).state_dict()
    torch.rand(5)  # the global generator has no part in it
    torch.testing.assert_close(dummy_model(config, dtype=dtype, seed=3).state_dict(), first, rtol=0, atol=0)
    other = dummy_model(config, dtype=dtype, seed=4).state_dict()
    assert not any(torch.equal(other[name], first[name]) for name in first)


def test_global_generator_is_untouched(config: ModelConfig) -> None:
    before = torch.get_rng_state()
    dummy_model(config, dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_differ(config: ModelConfig) -> None:
    model = dummy_model(config, dtype=torch.float32)
    weights = [layer.qkv_weight for layer in model.layers]
    assert len({weight.sum().item() for weight in weights}) == len(weights)


def test_a_parameter_depends_on_its_name_only(tiny_config: Callable[..., dict[str, Any]]) -> None:
    """A deeper model begins with the layers of a shallower one."""
    shallow, deep = (
        dummy_model(ModelConfig.from_hf(tiny_config(num_hidden_layers=n)), dtype=torch.float32).state_dict()
        for n in (1, 3)
    )
    assert all(torch.equal(deep[name], tensor) for name, tensor in shallow.items())


def test_sizes(config: ModelConfig) -> None:
    """Within 5 standard errors of the stated deviations, taking the smallest parameter of each kind."""
    model = dummy_model(config, dtype=torch.float32)
    layer = model.layers[0]
    assert layer.down_weight.std().item() == pytest.approx(96**-0.5, rel=5 / (2 * layer.down_weight.numel()) ** 0.5)
    assert model.embed_weight.std().item() == pytest.approx(64**-0.5, rel=5 / (2 * model.embed_weight.numel()) ** 0.5)
    assert (layer.input_norm_weight - 1).abs().max() < 0.1
    assert 0 < layer.qkv_bias.abs().max() < 0.1


def logits(model: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """Prefill of one sequence."""
    num_tokens = len(token_ids)
    cache = KVCache.allocate(model.config, 3, num_tokens, dtype=model.dtype, device=model.device)
    metadata = AttentionMetadata(
        block_tables=torch.tensor([[2]], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
    )
    preamble = model.preamble(token_ids, torch.arange(num_tokens), metadata, cache.block_size)
    return model.head(model.blocks(preamble.hidden, preamble, metadata, cache))


@DTYPES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_are_worth_sampling(tiny_config: Callable[..., dict[str, Any]], dtype: torch.dtype, tied: bool) -> None:
    """Finite, of a size of about 1, and different from token to token: neither a constant nor an echo of the input."""
    config = ModelConfig.from_hf(
        tiny_config(
            vocab_size=500, hidden_size=96, intermediate_size=256, num_hidden_layers=16, tie_word_embeddings=tied
        )
    )
    token_ids = torch.arange(32) * 7
    out = logits(dummy_model(config, dtype=dtype), token_ids).float()
    assert out.isfinite().all()
    assert 0.5 < out.std() < 2
    greedy = out.argmax(-1)
    assert len(greedy.unique()) > 5
    assert (greedy == token_ids).sum() < 16


@pytest.mark.gpu
def test_drawn_on_the_gpu(config: ModelConfig) -> None:
    first = dummy_model(config, dtype=torch.bfloat16, device="cuda").state_dict()
    again = dummy_model(config, dtype=torch.bfloat16, device="cuda").state_dict()
    assert all(tensor.is_cuda for tensor in first.values())
    torch.testing.assert_close(again, first, rtol=0, atol=0)
