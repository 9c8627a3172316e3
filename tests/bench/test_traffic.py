"""The bytes that a decode step must move."""

from dataclasses import replace

import pytest
import torch

from ostinato.bench import traffic
from ostinato.model import SHAPES, Decoder


@pytest.mark.parametrize("model", SHAPES)
def test_weights_are_those_of_the_decoder(model: str) -> None:
    """Every parameter once, but an embedding that is not the head: of that a step reads a few rows."""
    config = SHAPES[model]
    decoder = Decoder(config, dtype=torch.bfloat16, device="meta")
    total = sum(parameter.nbytes for parameter in decoder.parameters())
    unread = 0 if config.tie_embeddings else decoder.embed_weight.nbytes
    assert traffic.weight_bytes(config) == total - unread


def test_known_sums() -> None:
    """The models of the benchmarks: 2.47 and 15.0 GB of weights, 32.8 and 131.1 kB of keys and values a token."""
    small, large = SHAPES["llama-3.2-1b"], SHAPES["llama-3.1-8b"]
    assert traffic.weight_bytes(small) == pytest.approx(2.472e9, rel=1e-3)
    assert traffic.weight_bytes(large) == pytest.approx(15.01e9, rel=1e-3)
    assert traffic.kv_bytes(small, [1]) == 32768
    assert traffic.kv_bytes(large, [1000, 24]) == 1024 * 131072
    assert traffic.step_bytes(small, [10, 0]) == traffic.weight_bytes(small) + 327680


def test_a_window_bounds_what_is_read() -> None:
    config = replace(SHAPES["llama-3.2-1b"], sliding_window=100)
    assert traffic.kv_bytes(config, [1000, 50]) == 150 * 32768
