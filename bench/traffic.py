"""The bytes that a decode step must move, from the shapes alone."""

from ostinato.model import ModelConfig


def weight_bytes(config: ModelConfig, element_size: int = 2) -> int:
    """Weights read by one step: every layer's once, the head once; of the embedding only rows, which are not counted.

    A tied embedding is the head, and so is counted once.
    """
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner + 2 * hidden
    if config.attention_bias:
        layer += q + 2 * kv + hidden
    if config.mlp_bias:
        layer += 2 * inner + hidden
    if config.qk_norm:
        layer += 2 * head
    return element_size * (config.num_layers * layer + hidden + config.vocab_size * hidden)


def kv_bytes(config: ModelConfig, seq_lens: list[int], element_size: int = 2) -> int:
    """Keys and values of all layers: those of earlier tokens read, those of the new token written."""
    window = config.sliding_window or max(seq_lens, default=0)
    rows = sum(min(length, window) for length in seq_lens)
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * element_size * rows


def step_bytes(config: ModelConfig, seq_lens: list[int], element_size: int = 2) -> int:
    """One decode step of a batch with these lengths, the new tokens included."""
    return weight_bytes(config, element_size) + kv_bytes(config, seq_lens, element_size)
