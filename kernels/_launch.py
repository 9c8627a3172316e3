"""Launches that come again, without asking their tensors again."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from . import _triton

Prepared = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any], int]
"""What a launch has beside its tensors: grid, further arguments, constants by name (but PDL), warps."""

_MOST = 4096  # prompts have many lengths
_known: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...], Any]] = {}


def launch(kernel: Any, tensors: tuple[Tensor | None, ...], choice: Hashable, prepare: Callable[[], Prepared]) -> None:
    """Launch `kernel(*tensors, *arguments, **constants)`, with programmatic dependent launch where the device has it.

    To check the tensors, to plan and to have Triton look at every argument takes the host three times as long as the
    launch. All of that depends on the shapes, strides, dtypes and alignment of the tensors, and on `choice`: what comes
    a second time is launched as it was the first time.

    Args:
        choice: everything else that `prepare` depends on.
        prepare: checks the tensors, and says what the launch has beside them.
    """
    first = tensors[0]
    assert first is not None, "a kernel's first tensor is always there"
    pdl = _triton.has_pdl(first.device)
    # A list, since a generator would take twice as long.
    looks = [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in tensors]
    key = (id(kernel), choice, pdl, first.device, *looks)
    known = _known.get(key)
    if known is not None:
        run, rest, _ = known
        run(*tensors, *rest)
        return
    grid, arguments, constants, num_warps = prepare()
    if 0 in grid:
        return
    constants = {**constants, "PDL": pdl}
    compiled = kernel[grid](*tensors, *arguments, **constants, num_warps=num_warps, launch_pdl=pdl)
    if compiled is None:  # interpreted, or noted only
        return
    if len(_known) >= _MOST:
        _known.clear()
    names = kernel.arg_names[len(tensors) + len(arguments) :]
    rest = (*arguments, *(constants[name] for name in names))
    _known[key] = compiled[(*grid, 1, 1)[:3]], rest, kernel  # which must live as long as its id is a key
