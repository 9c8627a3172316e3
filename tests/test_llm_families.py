"""Every family through the engine: eager, and recorded whole and piecewise, with the same tokens."""

from typing import Any

import pytest

from ostinato import LLM, EngineConfig, SamplingParams
from ostinato.model import FAMILIES, ModelConfig

SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "qwen2": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 20, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "phi3": {
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    },
    "smollm3": {"no_rope_layers": [1, 0], "sliding_window": 6, "use_sliding_window": True},
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


def config_of(family: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "model_type": family,
            "vocab_size": 60,
            "hidden_size": 64,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
        | SPECIAL.get(family, {})
        | changes
    )


def generate(
    config: ModelConfig, graphs: Any, *, device: str = "cpu", max_model_len: int | None = None
) -> list[list[int]]:
    sizes = EngineConfig(
        max_num_seqs=3, block_size=16, graphs=graphs, capture="lazy", graph_warmup_steps=1, capture_sizes=(3,),
        max_model_len=max_model_len,
    )  # fmt: skip
    llm = LLM(config, load_format="dummy", dtype="float32", device=device, config=sizes)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))
    assert graphs == "off" or llm.graph_report().counts[graphs.upper()] > 8
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_give_the_tokens_of_eager_ones(family: str, device: str) -> None:
    """On a CPU's tape, and as CUDA graphs."""
    config = config_of(family)
    eager = generate(config, "off", device=device)
    assert len({tuple(tokens) for tokens in eager}) == 3
    for graphs in ("whole", "piecewise"):
        assert generate(config, graphs, device=device) == eager


def test_the_context_chooses_the_factors_of_longrope() -> None:
    """32 positions of pre-training: an engine for up to 32 takes the short factors, a longer one the long ones."""
    short, default = generate(config_of("phi3"), "off", max_model_len=32), generate(config_of("phi3"), "off")
    lists = {"type": "su", "short_factor": [3.0] * 4, "long_factor": [1.0] * 4}
    swapped = config_of("phi3", rope_scaling=lists)
    assert short != default
    assert generate(swapped, "off", max_model_len=32) == default
    assert generate(swapped, "off", max_model_len=33) == short
