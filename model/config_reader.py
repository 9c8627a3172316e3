"""Typed access to the contents of a `config.json`, with errors that name the key and the value."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .families import FAMILIES, FAMILY_OF_CLASS, GUARDS, NULL_IS_A_VALUE, Family

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class UnsupportedModelError(ValueError):
    """The config asks for something that this engine does not compute."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The first class of `architectures` that is known; where the list is absent or empty, `model_type`."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModelError(f"architectures must be a list of names, not {names!r}")
    model_type = config.get("model_type")
    if not names and isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    for name in names:
        if name in FAMILY_OF_CLASS:
            return FAMILY_OF_CLASS[name]
    found = (
        f"architecture {', '.join(names)}" if names else f"architectures names no class, and model_type {model_type!r}"
    )
    raise UnsupportedModelError(f"{found} is not supported; supported: {', '.join(FAMILY_OF_CLASS)}")


@dataclass(frozen=True)
class ConfigReader:
    """A config without nulls. An absent key gets the default that the caller names, or is missed by name."""

    config: Mapping[str, Any]

    @classmethod
    def of_family(cls, config: Mapping[str, Any], family: Family) -> "ConfigReader":
        """With what the family takes for absent keys."""
        given = {key for key, value in config.items() if value is not None or key in NULL_IS_A_VALUE}
        absent = {key: value for key, value in family.absent.items() if key not in given}
        return cls({key: value for key, value in (dict(config) | absent).items() if value is not None})

    def refuse_unsupported(self, family: Family) -> None:
        for key, guard in GUARDS.items():
            value = self.config.get(key)
            if key in family.keys or (key == "sliding_window" and self.config.get("use_sliding_window") is False):
                continue
            if value is not None and value not in guard.neutral:
                allowed = " or ".join((*map(repr, guard.neutral), "null"))
                raise UnsupportedModelError(f"config key {key} = {value!r} is not supported; supported: {allowed}")

    def size(self, key: str, default: int | None = None, *, least: int = 1, limit: int = 2**31 - 1) -> int:
        value = self.config.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"config key {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
            raise UnsupportedModelError(f"config key {key} = {value!r} is not a whole number from {least} to {limit}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.config.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"config key {key} is missing")
        # A whole number too large for a float compares as such, and would overflow below.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise UnsupportedModelError(f"config key {key} = {value!r} is not a positive finite number")
        return float(value)

    def positives(self, key: str, count: int) -> tuple[float, ...]:
        value = self.config.get(key)
        if value is None:
            raise UnsupportedModelError(f"config key {key} is missing")
        if not isinstance(value, list) or len(value) != count:
            raise UnsupportedModelError(f"config key {key} = {value!r} is not a list of {count} numbers")
        return tuple(ConfigReader({f"{key}[{i}]": item}).positive(f"{key}[{i}]") for i, item in enumerate(value))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise UnsupportedModelError(f"config key {key} = {value!r} is neither true nor false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.config.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
            raise UnsupportedModelError(f"config key {key} = {value!r} is not a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def dtype(self) -> torch.dtype | None:
        key = "dtype" if "dtype" in self.config else "torch_dtype"
        value = self.config.get(key, "auto")
        if value == "auto":
            return None
        name = value.removeprefix("torch.") if isinstance(value, str) else None
        if name not in DTYPES:
            raise UnsupportedModelError(
                f"config key {key} = {value!r} is not supported; supported: {', '.join(DTYPES)}"
            )
        return DTYPES[name]
