"""The capture primitives: what a failure leaves behind, outputs outside the pool, autocast and recompilation."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.runtime.cuda_backend import graph_backend
from ostinato.runtime.graph_backend import CaptureError, Graph, GraphBackend, GraphPool, collector_off
from ostinato.runtime.graph_capture import (
    aliased_outputs,
    autocast_scope,
    capture_into_graph,
    capture_with_static_outputs,
)
from ostinato.runtime.tape_graph import TapeBackend

CPU = torch.device("cpu")


class Broken(GraphBackend):
    """Mixed into a backend: fails at one stage, before or after the stage has done its work."""

    stage, after = "", False

    def _maybe(self, stage: str, work: Any) -> None:
        if self.stage == stage and not self.after:
            raise RuntimeError(f"forced at {stage}")
        work()
        if self.stage == stage:
            raise RuntimeError(f"forced at {stage}")

    def begin(self, graph: Graph, pool: GraphPool) -> None:
        self._maybe("begin", lambda: super(Broken, self).begin(graph, pool))

    def end(self, graph: Graph) -> None:
        self._maybe("end", lambda: super(Broken, self).end(graph))

    def instantiate(self, graph: Graph) -> None:
        self._maybe("instantiate", lambda: super(Broken, self).instantiate(graph))


def broken_backend(device: str, stage: str, after: bool) -> Any:
    class Backend(Broken, type(graph_backend(torch.device(device)))):  # type: ignore[misc]
        pass

    backend = Backend(torch.device(device))
    backend.stage, backend.after = stage, after
    return backend


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", ["begin", "run", "end", "instantiate"])
def test_a_failed_capture_leaves_nothing_behind(stage: str, after: bool, device: str) -> None:
    """B43: the thread's stream, the allocator and the memory are back; the next capture on the pool works."""
    backend = broken_backend(device, stage, after)
    pool, outer, x = backend.new_pool(), backend.current_stream(), torch.randn(1 << 22, device=device)
    out = torch.zeros_like(x)
    with backend.on_capture_stream():  # so that whatever the first use of a stream or kernel takes is there
        torch.add(x + 1, 1, out=out)
    before = used_bytes(backend)

    def run() -> Tensor:
        y = x + 1
        if stage == "run":
            raise ValueError("forced at run")
        return y

    with pytest.raises((RuntimeError, ValueError), match=f"forced at {stage}") as caught:
        capture_into_graph(run, pool, backend.device, None)
    assert caught.value.__cause__ is None
    del caught
    assert backend.current_stream() == outer
    assert used_bytes(backend) - before <= 2 << 20
    assert backend.pool_bytes(pool) == 0
    assert gc.isenabled()
    assert aliased_outputs(pool, {"new": x + 1}) == []
    backend.stage, stage = "none", "none"
    graph, _ = capture_into_graph(lambda: out.copy_(run()), pool, backend.device, None)
    out.zero_()
    graph.replay()
    assert torch.equal(out, x + 1)
    assert backend.pool_bytes(pool) >= x.nbytes


def used_bytes(backend: GraphBackend) -> int:
    """Of this process: on a device other ones may come and go meanwhile."""
    if backend.device.type == "cpu":
        return backend.memory_bytes()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_without_the_clean_up_the_next_capture_would_fail() -> None:
    """The harm that `abandon` undoes is real on the tape too: the drills above test something."""
    backend = TapeBackend()
    pool, outer = backend.new_pool(), backend.current_stream()
    stuck = backend.new_graph()
    backend.begin(stuck, pool)
    try:
        assert backend.current_stream() is not outer
        with pytest.raises(CaptureError, match="recording already"):
            backend.begin(backend.new_graph(), pool)
    finally:
        backend.abandon(stuck, pool)
    assert backend.current_stream() is outer


def test_other_graphs_of_the_pool_survive_a_failure(device: str) -> None:
    """A read back to the host cannot be captured on either backend."""
    backend = graph_backend(torch.device(device))
    pool, x, out = backend.new_pool(), torch.randn(256, device=device), torch.zeros(256, device=device)
    with backend.on_capture_stream():
        torch.add(x * 2, 1, out=out)
        (x * 3).sum()
    good, _ = capture_into_graph(lambda: torch.add(x * 2, 1, out=out), pool, backend.device, None)
    held = backend.pool_bytes(pool)
    with pytest.raises(RuntimeError):
        capture_into_graph(lambda: [(x * 2), (x * 3).sum().item()], pool, backend.device, None)
    assert backend.pool_bytes(pool) == held
    assert torch.randn(2, device=device).isfinite().all(), "the random generator draws again"
    out.zero_()
    good.replay()
    assert torch.equal(out, x * 2 + 1)
    good.reset()
    again, _ = capture_into_graph(lambda: torch.add(x * 2, 3, out=out), pool, backend.device, None)
    again.replay()
    assert torch.equal(out, x * 2 + 3)


def test_static_outputs_lie_outside_the_pool_and_outlive_other_replays() -> None:
    """B39: four graphs in one pool, replayed in any order; nothing handed out changes but by its own graph."""
    backend = TapeBackend()
    pool, inputs, kept = backend.new_pool(), [torch.randn(8 << i) for i in (3, 2, 1, 0)], []
    for x in inputs:

        def run(x: Tensor = x) -> dict[str, Tensor]:
            return {"double": (x + 1) * 2, "sum": (x + 1).sum()}

        graph, outputs = capture_with_static_outputs(run, run(), pool, CPU, None)
        assert aliased_outputs(pool, outputs) == []
        kept.append((graph, outputs, x))
    order = torch.randint(4, (100,)).tolist()
    expected: dict[int, dict[str, Tensor]] = {}
    for index in order:
        graph, _, x = kept[index]
        x.normal_()
        expected[index] = {"double": (x + 1) * 2, "sum": (x + 1).sum()}
        graph.replay()
        for other, values in expected.items():
            for name, value in values.items():
                assert torch.equal(kept[other][1][name], value), (other, name)


def test_what_is_allocated_between_captures_is_no_graph_s_scratch(device: str) -> None:
    """B39: canaries that come after the captures whose scratch is free again."""
    backend = graph_backend(torch.device(device))
    pool, x = backend.new_pool(), torch.randn(4096, device=device)
    kept, canaries = [], {}  # with the outputs: whoever drops them gives their memory to others
    for size in (4096, 2048, 1024, 512):

        def run(size: int = size) -> dict[str, Tensor]:
            return {"y": (x[:size] * 2 + 1).relu() * 3}

        with backend.on_capture_stream():
            warm = run()
        kept.append(capture_with_static_outputs(run, warm, pool, backend.device, None))
        canaries[str(size)] = torch.full((size,), 7.0, device=device)
    for index in torch.randint(4, (100,)).tolist():
        kept[index][0].replay()
    assert all(canary.eq(7).all() for canary in canaries.values())
    assert aliased_outputs(pool, canaries) == []


def test_an_owned_out_buffer_is_the_static_output() -> None:
    backend = TapeBackend()
    pool, x, owned = backend.new_pool(), torch.randn(8), torch.zeros(8)

    def run() -> dict[str, Tensor]:
        return {"y": torch.mul(x, 2, out=owned)}

    graph, outputs = capture_with_static_outputs(run, run(), pool, CPU, None)
    assert outputs["y"] is owned or outputs["y"].data_ptr() == owned.data_ptr()
    x.normal_()
    graph.replay()
    assert torch.equal(outputs["y"], x * 2)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (lambda x: {"z": x + 1}, r"outputs \['z'\] are not those of the warm-up, \['y'\]"),
        (lambda x: {"y": (x + 1)[:2]}, r"output 'y' is \(2,\).*\(4,\)"),
        (lambda x: {"y": (x + 1).double()}, r"float64.*float32"),
    ],
    ids=["name", "shape", "dtype"],
)
def test_outputs_that_differ_from_the_warm_up_are_refused(later: Any, message: str) -> None:
    x, pool = torch.randn(4), TapeBackend().new_pool()
    with pytest.raises(CaptureError, match=message):
        capture_with_static_outputs(lambda: later(x), {"y": x + 1}, pool, CPU, None)


def test_autocast_scope() -> None:
    a = torch.randn(4, 4)
    with autocast_scope(torch.bfloat16, "cpu"):
        assert (a @ a).dtype == torch.bfloat16
        with autocast_scope(None, "cpu"):
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_capture_has_its_own_autocast(dtype: torch.dtype | None) -> None:
    a, pool = torch.randn(4, 4), TapeBackend().new_pool()
    with torch.autocast("cpu", torch.float16):
        graph, out = capture_into_graph(lambda: a @ a, pool, CPU, dtype)
    graph.replay()
    assert out.dtype == (dtype or torch.float32)
    with autocast_scope(dtype, "cpu"):
        assert torch.equal(out, a @ a)


def test_garbage_waits_until_the_capture_is_over() -> None:
    seen = []
    capture_into_graph(lambda: seen.append(gc.isenabled()), TapeBackend().new_pool(), CPU, None)
    assert seen == [False]
    assert gc.isenabled()
    with collector_off():
        capture_into_graph(lambda: None, TapeBackend().new_pool(), CPU, None)
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        capture_into_graph(lambda: None, TapeBackend().new_pool(), CPU, None)
        assert not gc.isenabled(), "left as it was"
    finally:
        gc.enable()


def test_a_compiled_function_that_would_compile_again_is_refused_with_the_guard() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def double(x: Tensor) -> Tensor:
        return x * 2

    pool, x = TapeBackend().new_pool(), torch.randn(4)
    double(x)
    calls: list[Tensor] = []
    with pytest.raises(RuntimeError, match=r"(?s)recompile.*guard failure.*\S"):
        capture_into_graph(lambda: calls.append(double(torch.empty(5))), pool, CPU, None)
    assert not calls
    out = torch.zeros(4)
    graph, _ = capture_into_graph(lambda: torch.add(x, 1, out=out), pool, CPU, None)
    graph.replay()
    assert torch.equal(out, x + 1)
