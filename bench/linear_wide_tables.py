"""The part of docs/kernels.md on projections of 64 to 256 tokens."""

from collections.abc import Iterator

from records import TITLES, environment, runs

BATCHES = (64, 128, 256)
OPS = ("qkv", "o", "gate_up", "down", "head")
