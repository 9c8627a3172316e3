"""Random weights, for benchmarks and tests that need a model's shape and none of its knowledge."""

from __future__ import annotations

import hashlib

import torch

from ..model.config import ModelConfig
from ..model.decoder import Decoder


def dummy_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    context: int | None = None,
) -> Decoder:
    """A model whose weights depend on the seed and on each parameter's name, for one dtype and kind of device.

    A projection is normal with the standard deviation 1 / sqrt(inputs), 0.02 at 2500 inputs, which keeps every
    projection of a normed input, and so the logits, at a size of about 1 whatever the model's width. Norms are 1 and
    biases 0, both give or take 0.02. Values are drawn in place on the device; no second copy exists. `context` is the
    decoder's.
    """
    model = Decoder(config, dtype=dtype, device=device, context=context)
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device=parameter.device).manual_seed(_seed(seed, name))
        if name.endswith("norm_weight"):
            parameter.normal_(1.0, 0.02, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
