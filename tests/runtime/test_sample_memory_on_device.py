"""What sampling adds to the memory of graphs at a large vocabulary."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ostinato.model import SHAPES
from ostinato.runtime import Engine, EngineConfig
from ostinato.weights import dummy_model

VOCAB, ROWS = 128256, 32


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_no_kind_of_sampling_keeps_rows_of_the_vocabulary_in_the_pool(mode: Any) -> None:
    """What is captured first, largest and greedy, has room for all that other kinds need beside the head's logits."""
    shape = replace(SHAPES["smollm2-135m"], vocab_size=VOCAB, num_layers=1)
    model = dummy_model(shape, dtype=torch.bfloat16, device="cuda")
    sizes: dict[str, Any] = {"max_num_seqs": ROWS, "max_model_len": 256, "capture_sizes": (1, 8, ROWS)}
    config = EngineConfig(graphs=mode, kv_cache_memory_bytes=1 << 26, **sizes)
    graphs = Engine(model, config, tokenizer=None, eos_token_ids=()).decode_runner.graphs
    assert graphs is not None
    assert graphs.drops() == []
    print("\n".join(graphs.ledger.lines()))
    sampled = [one for one in graphs.ledger.entries if "sample" in one.runner or one.key_info not in ("", "greedy")]
    assert len(sampled) == (6 if mode == "whole" else 9)
    assert [one.pool_bytes for one in sampled] == [0] * len(sampled)
