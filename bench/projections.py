"""The projections of a model, their chain as a decode step runs it, and short names of plans."""

from typing import Any

import torch

from ostinato.kernels._linear_call import LinearCall
from ostinato.kernels._linear_plan import LinearPlan
from ostinato.kernels.linear import linear_planned
from ostinato.model import ModelConfig

BF16 = torch.bfloat16
OPS = ("qkv", "o", "gate_up", "down", "head")
BLAS = LinearPlan("blas")


class Chain:
    """Random weights of a model's projections, and its decode chain without attention."""

    def __init__(
        self, config: ModelConfig, tokens: int, device: str, layers: int | None = None,
        weights: dict[str, list[torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        hidden, inner = config.hidden_size, config.intermediate_size
        q = config.num_heads * config.head_dim
        qkv = q + 2 * config.num_kv_heads * config.head_dim
        self.tokens, self.layers, self.q = tokens, layers or config.num_layers, q
        self.shapes = {
            "qkv": (qkv, hidden),
            "o": (hidden, q),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (config.vocab_size, hidden),
        }

        def weight(rows: int, cols: int) -> torch.Tensor:
            made = torch.empty(rows, cols, dtype=BF16, device=device)
            return made if device == "meta" else made.normal_(std=cols**-0.5)

        self.weights = weights or {
            name: [weight(*shape) for _ in range(1 if name == "head" else self.layers)]
            for name, shape in self.shapes.items()
        }
        self.norm = torch.ones(hidden, dtype=BF16, device=device)
        self.hidden = weight(tokens, hidden)
        self.buffers = {
            "qkv": weight(tokens, qkv), "o": weight(tokens, hidden), "gate_up": weight(tokens, inner),
            "down": weight(tokens, hidden), "head": weight(tokens, config.vocab_size),
        }  # fmt: skip

    def bytes_of(self, name: str) -> int:
        rows, cols = self.shapes[name]
        return 2 * rows * cols * len(self.weights[name])

    def arguments(self, name: str, hidden: torch.Tensor) -> dict[str, Any]:
        buffers = self.buffers
        norm: dict[str, Any] = {"norm_weight": self.norm, "norm_eps": 1e-5}
        return {
            "qkv": {"x": hidden, **norm},
            "o": {"x": buffers["qkv"][:, : self.q], "residual": hidden},
            "gate_up": {"x": buffers["o"], **norm, "swiglu": True},
            "down": {"x": buffers["gate_up"], "residual": buffers["o"]},
            "head": {"x": hidden, **norm},
        }[name] | {"out": buffers[name]}

    def alone(self, name: str, plan: LinearPlan) -> None:
        arguments = self.arguments(name, self.hidden)
        for weight in self.weights[name]:
            linear_planned(LinearCall(weight=weight, **arguments), plan)

    def step(self, plans: dict[str, LinearPlan]) -> None:
        hidden = self.step_layers(plans)
        linear_planned(LinearCall(weight=self.weights["head"][0], **self.arguments("head", hidden)), plans["head"])

    def step_layers(self, plans: dict[str, LinearPlan]) -> torch.Tensor:
        hidden = self.hidden
        for layer in range(self.layers):
            for name in OPS[:-1]:
                call = LinearCall(weight=self.weights[name][layer], **self.arguments(name, hidden))
                linear_planned(call, plans[name])
            hidden = self.buffers["down"]
        return hidden


def label(plan: LinearPlan) -> str:
    """n4k1024w4e1p0, and with tensor cores s4x2c4a behind it: stages, shares of K, slices, a norm apart."""
    if plan.road == "blas":
        return "blas"
    text = f"n{plan.block_n}k{plan.block_k}w{plan.num_warps}e{plan.early}p{plan.programs_per_sm}"
    if plan.road == "gemv":
        return text
    return f"{text}s{plan.num_stages}x{plan.split_k}c{plan.slices}{'a' * plan.norm_apart}"
