"""What the kernel files need of Triton, so that they import where Triton is absent.

A launcher asks `on_triton` whether its tensors go to the device kernel or to the reference. CUDA tensors go to the
kernel, CPU tensors to the reference, unless Triton's interpreter was on (`TRITON_INTERPRET=1`) when the kernels were
defined.
"""

from functools import cache
from typing import Any, no_type_check

import torch
from torch import Tensor

__all__ = ["HAVE_TRITON", "INTERPRETED", "cdiv", "current_stream", "device_name", "has_pdl", "has_tma",
           "next_power_of_2", "num_multiprocessors", "on_triton", "shared_memory", "tl", "triton"]  # fmt: skip

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Enough of `triton` and `triton.language` to define kernels, which then cannot run."""

        constexpr = object

        @staticmethod
        def jit(function: Any = None, **options: Any) -> Any:
            return function if function is not None else lambda inner: inner

        @staticmethod
        def constexpr_function(function: Any) -> Any:
            return function

    triton: Any = _Absent()  # type: ignore[no-redef]
    tl: Any = triton  # type: ignore[no-redef]


@triton.jit
@no_type_check
def _probe() -> None:
    pass


HAVE_TRITON = hasattr(triton, "__version__")
INTERPRETED = HAVE_TRITON and type(_probe).__name__ == "InterpretedFunction"


def on_triton(x: Tensor) -> bool:
    """Whether an op on `x` runs its Triton kernel; raises ImportError for a CUDA tensor where Triton is missing.

    float64 is for checking: the kernels sum in float32, so it goes to the references everywhere.
    """
    if x.dtype == torch.float64:
        return False
    if x.is_cuda and not HAVE_TRITON:
        raise ImportError("tensors on a CUDA device need Triton: pip install triton")
    return x.is_cuda or INTERPRETED


def cdiv(number: int, size: int) -> int:
    """`number / size`, rounded up. For launchers: one call of Triton's own takes as long as a fifth of a launch."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below `number`, which is positive; see `cdiv`."""
    return 1 << (number - 1).bit_length()


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream on a CUDA device."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; for a CPU under the interpreter, a small odd number that exercises loops."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@cache
def device_name(device: torch.device) -> str:
    """The name under which tables of measured choices list a CUDA device; empty for a CPU."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on a CUDA device; the least of any supported one for a CPU."""
    least = 101376
    if device.type != "cuda":
        return least
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", least))


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` are launched with programmatic dependent launch: compute capability 9 and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def has_tma(device: torch.device) -> bool:
    """Whether `device` has a tensor memory accelerator, compute capability 9 and above, or the interpreter plays it."""
    return device.type != "cuda" or has_pdl(device)
