"""The projections of a model, their chain as a decode step runs it, and short names of plans."""

from typing import Any

import torch
import torch.nn.functional as F

from ostinato.kernels import add_rms_norm, residual_add, rms_norm, swiglu
from ostinato.kernels._linear_call import LinearCall
from ostinato.kernels._linear_plan import LinearPlan, linear_plan
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
            "head": weight(tokens, config.vocab_size),
        }  # fmt: skip
        self.buffers["down"] = self.buffers["o"]  # the residual stream has one buffer

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

    def result(self, name: str, plan: LinearPlan) -> torch.Tensor:
        """What `alone` leaves, of inputs that are the same for every plan."""
        self.buffers["o"].copy_(self.hidden)
        self.alone(name, plan)
        return self.buffers[name].clone()

    def alone(self, name: str, plan: LinearPlan) -> None:
        """A projection of every layer; those with a residual add to what they left the last time."""
        arguments = self.arguments(name, self.buffers["o"] if name == "o" else self.hidden)
        for weight in self.weights[name]:
            linear_planned(LinearCall(weight=weight, **arguments), plan)

    def step_neighbours(self) -> None:
        """The layers by `F.linear`, SwiGLU, and one kernel for a residual add and the norm after it."""
        hidden, (normed, total) = self.hidden, (torch.empty_like(self.hidden) for _ in range(2))
        rms_norm(hidden, self.norm, 1e-5, out=normed)
        for layer in range(self.layers):
            weights = {name: self.weights[name][layer] for name in OPS[:-1]}
            context = torch.mm(normed, weights["qkv"].t(), out=self.buffers["qkv"])[:, : self.q]
            add_rms_norm(F.linear(context, weights["o"]), hidden, self.norm, 1e-5, out=normed, out_sum=total)
            inner = swiglu(F.linear(normed, weights["gate_up"]), out=self.buffers["gate_up"])
            add_rms_norm(
                F.linear(inner, weights["down"]), total, self.norm, 1e-5, out=normed, out_sum=self.buffers["o"]
            )
            hidden = self.buffers["o"]

    def neighbours(self, name: str) -> None:
        """A projection by `F.linear`, its neighbours kernels of their own."""
        arguments = self.arguments(name, self.hidden)
        for weight in self.weights[name]:
            x = arguments["x"]
            if "norm_weight" in arguments:
                x = rms_norm(x, self.norm, 1e-5)
            y = F.linear(x, weight)
            if "swiglu" in arguments:
                swiglu(y, out=arguments["out"])
            if "residual" in arguments:
                residual_add(y, arguments["residual"], out=arguments["out"])

    def step(self, plans: dict[str, LinearPlan]) -> None:
        hidden = self.step_layers(plans)
        linear_planned(LinearCall(weight=self.weights["head"][0], **self.arguments("head", hidden)), plans["head"])

    def step_layers(self, plans: dict[str, LinearPlan]) -> torch.Tensor:
        hidden = self.hidden
        for layer in range(self.layers):
            for name in OPS[:-1]:
                call = LinearCall(weight=self.weights[name][layer], **self.arguments(name, hidden))
                linear_planned(call, plans[name])
            hidden = self.buffers["o"]
        return hidden


def planned(chain: Chain) -> dict[str, LinearPlan]:
    """The plans of `linear` on an H200."""
    facts: dict[str, Any] = {"element_size": 2, "device_name": "NVIDIA H200", "shared_memory": 232448}
    return {name: linear_plan(chain.tokens, *chain.shapes[name], swiglu=name == "gate_up", **facts) for name in OPS}


def label(plan: LinearPlan) -> str:
    """n4k1024w4e1p0, and with tensor cores s4x2c4a behind it: stages, shares of K, slices, a norm apart."""
    if plan.road == "blas":
        return "blas"
    if plan.road == "tile":
        text = f"m{plan.block_m}n{plan.block_n}k{plan.block_k}w{plan.num_warps}s{plan.num_stages}x{plan.split_k}"
        return f"{text}e{plan.early}"
    text = f"n{plan.block_n}k{plan.block_k}w{plan.num_warps}e{plan.early}p{plan.programs_per_sm}"
    if plan.road == "gemv":
        return text
    return f"{text}s{plan.num_stages}x{plan.split_k}c{plan.slices}{'a' * plan.norm_apart}"
