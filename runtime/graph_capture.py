"""Making one graph: the capture itself, its cleaning up after a failure, and outputs outside the pool."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from .graph_backend import CaptureError, Graph, GraphPool, collector_off

T = TypeVar("T")


@contextlib.contextmanager
def autocast_scope(dtype: torch.dtype | None, device_type: str = "cuda") -> Iterator[None]:
    """Autocast to `dtype`; None runs in the tensors' own types and shuts out any autocast around it."""
    with torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
        yield


def capture_into_graph(
    run: Callable[[], T], pool: GraphPool, device: torch.device, autocast_dtype: torch.dtype | None
) -> tuple[Graph, T]:
    """Record `run` into a new graph whose new tensors come from `pool`; returns the graph and what `run` returned.

    The work must have run before on the capture stream (`GraphBackend.on_capture_stream`), so that nothing is compiled,
    loaded or grown in here. No garbage is collected meanwhile: it could destroy a graph, which a capture forbids.

    When anything fails, the thread is back on its stream, the pool records nothing and gets back what the capture took,
    and the error of `run` is raised as it came: later captures on this pool work. A `torch.compile`d function that
    would compile again fails at its call, with the guard that broke, before it touches the device.

    Raises:
        CaptureError: the work cannot be recorded. Whatever `run` raises passes through.
    """
    backend, graph = pool.backend, pool.backend.new_graph()
    results: list[T] = []
    with collector_off():
        try:
            backend.begin(graph, pool)
            with autocast_scope(autocast_dtype, device.type), _no_compilation():
                results.append(run())
            backend.end(graph)
            backend.instantiate(graph)
        except BaseException as error:
            results.clear()
            traceback.clear_frames(error.__traceback__)  # the locals of `run` hold tensors of the pool too
            backend.abandon(graph, pool)
            raise
    return graph, results[0]


def capture_with_static_outputs(
    run: Callable[[], Mapping[str, Tensor]],
    warm_outputs: Mapping[str, Tensor],
    pool: GraphPool,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
) -> tuple[Graph, dict[str, Tensor]]:
    """Record `run` so that its outputs end in buffers that were allocated before the capture, outside the pool.

    Memory that a graph frees while it records goes to the graphs recorded after it. An output in the pool may so lie
    where an *earlier* graph has its scratch: replaying that one overwrites it, however strongly it is referenced. An
    output outside is changed by this graph's own next replay and by nothing else.

    Args:
        run: returns `{name: tensor}`. A tensor that `run` itself writes to an owned buffer (`out=`) is taken as it is;
            every other one is copied, as the last thing in the graph.
        warm_outputs: what `run` returned in a warm-up; they give names, shapes and dtypes.

    Raises:
        CaptureError: `run` returned other names, shapes or dtypes than in the warm-up, or what cannot be recorded.
    """
    buffers = {name: torch.empty_like(warm) for name, warm in warm_outputs.items()}

    def run_and_copy() -> None:
        outputs = run()
        if outputs.keys() != warm_outputs.keys():
            raise CaptureError(f"outputs {sorted(outputs)} are not those of the warm-up, {sorted(warm_outputs)}")
        for name, output in outputs.items():
            warm = warm_outputs[name]
            if (output.shape, output.dtype) != (warm.shape, warm.dtype):
                was, now = (f"{tuple(t.shape)} {t.dtype}" for t in (warm, output))
                raise CaptureError(f"output {name!r} is {now} but was {was} in the warm-up")
            # While the warm output is alive nothing else can have its address: it is a buffer that `run` owns.
            if output.data_ptr() == warm.data_ptr():
                buffers[name] = warm
            else:
                buffers[name].copy_(output)

    graph, _ = capture_into_graph(run_and_copy, pool, device, autocast_dtype)
    return graph, buffers


def aliased_outputs(pool: GraphPool, tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those tensors that lie in the pool's memory, wholly or in part."""
    ranges = pool.backend.pool_ranges(pool)
    return [name for name, tensor in tensors.items() if any(_overlap(_addresses(tensor), r) for r in ranges)]


def _addresses(tensor: Tensor) -> range:
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
