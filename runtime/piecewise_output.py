"""What a captured region hands back."""

from collections.abc import Iterator, KeysView, Mapping
from typing import TypeVar

from torch import Tensor

D = TypeVar("D")


class PiecewiseOutput:
    """The outputs of a region by name, cut to the rows that are real.

    Args:
        outputs: the region's output buffers, padding rows included.
        real_len: leading rows that mean something.
    """

    def __init__(self, outputs: Mapping[str, Tensor], real_len: int) -> None:
        self._outputs = outputs
        self.real_len = real_len

    def __getitem__(self, key: str) -> Tensor:
        """A copy of the real rows, the caller's to keep."""
        return self._outputs[key][: self.real_len].clone()

    def get(self, key: str, default: D | None = None) -> Tensor | D | None:
        """The same, or `default` where there is no such output."""
        return self[key] if key in self._outputs else default

    def get_view(self, key: str, default: D | None = None) -> Tensor | D | None:
        """The real rows themselves. This runner's next `run` overwrites them, and nothing else does."""
        return self._outputs[key][: self.real_len] if key in self._outputs else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __contains__(self, key: object) -> bool:
        return key in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def keys(self) -> KeysView[str]:
        return self._outputs.keys()
