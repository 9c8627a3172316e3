"""Compile kernels ahead of time, with no GPU: what ptxas makes of every configuration that a launcher would use.

A launcher is called with CPU tensors while `recording()` stands in for the device; each kernel launch is noted instead
of run, with the arguments specialised as Triton's own launcher specialises them. `compile_launch` then builds one noted
launch for one architecture.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ostinato.kernels import _triton

# Multiprocessors, and bytes of shared memory that one program can have: A100, H200, B200.
DEVICES = {80: (108, 166912), 90: (132, 232448), 100: (148, 232448)}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything that decides the machine code."""

    function: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: frozenset[str]
    options: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for launches of the same machine code."""
        return self.name, self.signature, self.constants, self.aligned, self.options

    @property
    def name(self) -> str:
        return str(self.function.__name__)


@dataclass(frozen=True)
class Compiled:
    """What came out: resources of a program (bytes of shared memory, registers a thread, spilled bytes) and the PTX."""

    registers: int
    stack: int
    shared: int
    ptx: str


def _specialise(name: str, value: Any, plain: bool) -> tuple[str, Any, bool]:
    """(type, constant or None, whether divisible by 16) of one argument."""
    if value is None:
        return "constexpr", None, False
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{value.block_shape}>", None, False
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype], None, value.data_ptr() % 16 == 0
    if isinstance(value, bool):
        return "i1", None, False
    if isinstance(value, int):
        if value == 1 and not plain:
            return "constexpr", 1, False
        wide = not -(2**31) <= value < 2**31
        return "i64" if wide else "i32", None, value % 16 == 0 and not plain
    if isinstance(value, float):
        return "fp32", None, False
    raise TypeError(f"argument {name} is a {type(value).__name__}, which no kernel here takes")


@contextmanager
def recording(architecture: int = 90, name: str = "NVIDIA H200") -> Iterator[list[Launch]]:
    """Notes launches instead of running them, as if CPU tensors were on a device of that architecture."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bound = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self.arg_names}
        signature, constants, aligned = {}, {}, set()
        for parameter in self.params:
            value = bound[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            kind, constant, divisible = _specialise(parameter.name, value, parameter.do_not_specialize)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[parameter.name] = constant
            if divisible:
                aligned.add(parameter.name)
        options = {k: v for k, v in kwargs.items() if k in OPTIONS}
        shape = grid(bound) if callable(grid) else grid
        launches.append(
            Launch(
                self,
                tuple(signature.items()),
                tuple(constants.items()),
                frozenset(aligned),
                tuple(options.items()),
                tuple(shape),
            )
        )

    multiprocessors, shared_memory = DEVICES[architecture]
    substitutes = mock.patch.multiple(
        _triton,
        on_triton=lambda x: True,
        has_pdl=lambda device: architecture >= 90,
        has_tma=lambda device: architecture >= 90,
        num_multiprocessors=lambda device: multiprocessors,
        shared_memory=lambda device: shared_memory,
        device_name=lambda device: name if architecture == 90 else "",
    )
    with mock.patch.object(JITFunction, "run", run), substitutes:
        yield launches


def compile_launch(launch: Launch, architecture: int) -> Compiled:
    names = [name for name, _ in launch.signature]
    source = ASTSource(
        fn=launch.function,
        signature=dict(launch.signature),
        constexprs={(names.index(name),): value for name, value in launch.constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in launch.aligned},
    )
    options = {k: v for k, v in launch.options if not (k == "launch_pdl" and architecture < 90)}
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage = _resource_usage(kernel.asm["cubin"])
    return Compiled(usage["REG"], usage["STACK"] + usage["LOCAL"], kernel.metadata.shared, kernel.asm["ptx"])


def compile_everywhere(launches: Iterable[Launch], architectures: Iterable[int], workers: int) -> list[Compiled]:
    """Every launch for every architecture, launches outermost, in `workers` processes. CUDA must not be in use yet."""
    return [future.result() for future in compile_behind(launches, architectures, workers)]


def compile_behind(launches: Iterable[Launch], architectures: Iterable[int], workers: int) -> list[Future[Compiled]]:
    """`compile_everywhere`, going on while the caller does something else."""
    jobs = [(launch, architecture) for launch in launches for architecture in architectures]
    _JOBS[:] = jobs  # forked processes inherit it: a kernel cannot be pickled
    pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"))
    futures = [pool.submit(_compile_job, index) for index in range(len(jobs))]
    pool.shutdown(wait=False)
    return futures


_JOBS: list[tuple[Launch, int]] = []


def _compile_job(index: int) -> Compiled:
    return compile_launch(*_JOBS[index])


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)
    assert usage, f"cuobjdump names no registers: {report}"
    return {key: int(value) for key, value in usage}
