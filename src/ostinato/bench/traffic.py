"""The bytes that a decode step must move, from the shapes alone."""

from ..model import ModelConfig


def weight_bytes(config: ModelConfig, element_size: int = 2) -> int:
    """Weights read by one step: every layer's once, the head once; of the embedding only rows, which are not counted.

    A tied embedding is the head, and so is counted once.
    """
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return element_size * (config.num_parameters - embedding)


def kv_bytes(config: ModelConfig, seq_lens: list[int], element_size: int = 2) -> int:
    """Keys and values of all layers: those of earlier tokens read, those of the new token written."""
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    rows = sum(min(length, window or length) for length in seq_lens for window in windows)
    return 2 * config.kv_size * element_size * rows


def step_bytes(config: ModelConfig, seq_lens: list[int], element_size: int = 2) -> int:
    """One decode step of a batch with these lengths, the new tokens included."""
    return weight_bytes(config, element_size) + kv_bytes(config, seq_lens, element_size)
