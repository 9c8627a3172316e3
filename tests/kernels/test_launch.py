"""A launch that comes again does not look at its tensors; one that differs in anything that matters does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import _launch, _triton


class Kernel:
    """Stands in for a compiled kernel with two tensors, two arguments and two constants; notes how it is launched."""

    arg_names = ("x_ptr", "out_ptr", "size", "stride", "BLOCK", "PDL")

    def __init__(self) -> None:
        self.first: list[Any] = []
        self.again: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            self.first.append((grid, args, named))
            return self.compiled

        return run

    @property
    def compiled(self) -> Any:
        kernel = self

        class Compiled:
            function, packed_metadata = "function", "metadata"

            def run(self, x: int, y: int, z: int, *args: Any) -> None:
                kernel.again.append(((x, y, z), args))

        return Compiled()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(_triton, "current_stream", lambda index: f"stream of {index}")
    return Kernel()


def run(kernel: Kernel, x: Tensor, out: Any, choice: int = 3, grid: tuple[int, ...] = (5,)) -> None:
    constants = {"BLOCK": 8}
    _launch.launch(kernel, (x, out), choice, lambda: (grid, (x.shape[0], x.stride(0)), constants, 4))


def test_again_is_as_the_first_time(kernel: Kernel) -> None:
    x, y = torch.zeros(4, 6), torch.ones(4, 6)
    run(kernel, x, None)
    run(kernel, y, None)
    ((grid, args, named),) = kernel.first
    assert (grid, args[1:]) == ((5,), (None, 4, 6))
    assert named == {"BLOCK": 8, "PDL": False, "num_warps": 4, "launch_pdl": False}
    ((grid, args),) = kernel.again
    assert (grid, args[:6]) == ((5, 1, 1), ("stream of None", "function", "metadata", None, None, None))
    assert args[6:] == (y.data_ptr(), None, 4, 6, 8, False)


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(5, 6), None, 3),
        (torch.zeros(6, 4).t(), None, 3),
        (torch.zeros(4, 6).half(), None, 3),
        (torch.zeros(25)[1:].view(4, 6), None, 3),
        (torch.zeros(4, 6), torch.zeros(4), 3),
        (torch.zeros(4, 6), None, 4),
    ],
    ids=["shape", "strides", "dtype", "alignment", "a tensor more", "choice"],
)
def test_a_launch_that_differs_is_prepared(kernel: Kernel, other: tuple[Tensor, Tensor | None, int]) -> None:
    run(kernel, torch.zeros(4, 6), None)
    run(kernel, *other)
    assert len(kernel.first) == 2
    assert not kernel.again


def test_a_descriptor_is_handed_on_and_looked_at(kernel: Kernel) -> None:
    x, base = torch.zeros(4, 6), torch.zeros(8, 16)
    first, second, taller = (
        SimpleNamespace(base=base, shape=[8, 16], strides=[16, 1], block_shape=[rows, 4]) for rows in (2, 2, 4)
    )
    run(kernel, x, first)
    run(kernel, x, second)
    ((_, args),) = kernel.again
    assert args[6:8] == (x.data_ptr(), second)
    run(kernel, x, taller)
    assert len(kernel.first) == 2


def test_a_device_switch_is_seen(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    run(kernel, torch.zeros(4, 6), None)
    monkeypatch.setattr(_triton, "has_pdl", lambda device: True)
    run(kernel, torch.zeros(4, 6), None)
    assert [named["launch_pdl"] for _, _, named in kernel.first] == [False, True]


def test_nothing_to_do_is_not_launched(kernel: Kernel) -> None:
    run(kernel, torch.zeros(0, 6), None, grid=(0, 2))
    assert not kernel.first


def test_only_so_many_are_remembered(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "_MOST", 3)
    for size in range(1, 8):
        run(kernel, torch.zeros(size, 6), None)
    assert len(_launch._known) <= 3
