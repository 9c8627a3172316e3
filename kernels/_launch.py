"""Launches that come again, without asking their tensors again."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from . import _triton

Prepared = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any], int]
"""What a launch has beside its tensors: grid, further arguments, constants by name (but PDL), warps."""

_MOST = 4096  # prompts have many lengths


class _Known(NamedTuple):
    """A launch but for its tensors and stream. It holds the kernel, which must live as long as its id is a key."""

    run: Callable[..., None]
    grid: tuple[int, ...]
    function: Any
    metadata: Any
    rest: tuple[Any, ...]
    kernel: Any


_known: dict[Hashable, _Known] = {}


def launch(kernel: Any, tensors: tuple[Any, ...], choice: Hashable, prepare: Callable[[], Prepared]) -> None:
    """Launch `kernel(*tensors, *arguments, **constants)`, with programmatic dependent launch where the device has it.

    To check the tensors, to plan and to have Triton look at every argument takes the host many times as long as the
    launch. All of that depends on the shapes, strides, dtypes and alignment of the tensors, and on `choice`: what comes
    a second time is launched as it was the first time, by addresses, and without Triton's launch hooks.

    Args:
        tensors: the first arguments: tensors, None where one is absent, or Triton's descriptors of tensors.
        choice: everything else that `prepare` depends on.
        prepare: checks the tensors, and says what the launch has beside them.
    """
    first = tensors[0]
    assert first is not None, "a kernel's first tensor is always there"
    addresses: list[Any] = []
    looks: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            addresses.append(None)
            looks.append(None)
        elif isinstance(tensor, Tensor):
            address = tensor.data_ptr()
            addresses.append(address)
            looks.append((tensor.shape, tensor.stride(), tensor.dtype, address % 16))
        else:
            addresses.append(tensor)
            looks.append((*tensor.shape, *tensor.strides, *tensor.block_shape, tensor.base.dtype))
    device = first.device
    pdl = _triton.has_pdl(device)
    key = (id(kernel), choice, pdl, device, *looks)
    known = _known.get(key)
    if known is not None:
        stream = _triton.current_stream(device.index)
        known.run(*known.grid, stream, known.function, known.metadata, None, None, None, *addresses, *known.rest)
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
    _known[key] = _Known(
        run=compiled.run,
        grid=(*grid, 1, 1)[:3],
        function=compiled.function,
        metadata=compiled.packed_metadata,
        rest=(*arguments, *(constants[name] for name in names)),
        kernel=kernel,
    )
