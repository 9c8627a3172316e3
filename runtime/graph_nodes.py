"""What a recorded graph consists of, read from the graph itself."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GraphNode:
    """One piece of work.

    Attributes:
        kind: "kernel", "memcpy", "memset" …; "operator" on a tape.
        name: of the kernel or operator; empty where it has none.
        grid, block: programs and threads of a kernel; empty for others.
    """

    kind: str
    name: str = ""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()


@dataclass(frozen=True)
class GraphCounts:
    """Sizes of a graph; None where nobody can tell.

    Attributes:
        programmatic_edges: dependencies whose later kernel starts before the earlier one has ended (PDL).
    """

    nodes: int | None = None
    edges: int | None = None
    programmatic_edges: int | None = None


def count_cuda_graph(raw_graph: int) -> GraphCounts:
    """Of a `cudaGraph_t`; unknown where cuda-bindings cannot be imported."""
    driver = _driver()
    if driver is None:
        return GraphCounts()
    graph = driver.CUgraph(raw_graph)
    num_nodes = int(_call(driver.cuGraphGetNodes, graph, 0)[-1])
    query = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)  # one name for both since version 13
    num_edges = int(_call(query, graph, 0)[-1])
    data = _call(query, graph, num_edges)[2] if num_edges else ()
    programmatic = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return GraphCounts(num_nodes, num_edges, sum(int(edge.type) == programmatic for edge in data))


def cuda_graph_nodes(raw_graph: int) -> tuple[GraphNode, ...] | None:
    """The nodes of a `cudaGraph_t` in no particular order; None where cuda-bindings cannot be imported."""
    driver = _driver()
    if driver is None:
        return None
    graph = driver.CUgraph(raw_graph)
    num_nodes = int(_call(driver.cuGraphGetNodes, graph, 0)[-1])
    return tuple(
        _node(driver, node) for node in (_call(driver.cuGraphGetNodes, graph, num_nodes)[0] if num_nodes else ())
    )


def _node(driver: Any, node: Any) -> GraphNode:
    [kind] = _call(driver.cuGraphNodeGetType, node)
    name = str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return GraphNode(name)
    [of] = _call(driver.cuGraphKernelNodeGetParams, node)
    if int(of.func):
        [function] = _call(driver.cuFuncGetName, of.func)
    else:
        [function] = _call(driver.cuKernelGetName, of.kern)
    grid, block = (tuple(int(getattr(of, f"{what}Dim{axis}")) for axis in "XYZ") for what in ("grid", "block"))
    return GraphNode(name, function.decode(), grid, block)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def _call(function: Any, *args: Any) -> list[Any]:
    status, *results = function(*args)
    if int(status):
        raise RuntimeError(f"{function.__name__} failed: {status.name}")
    return list(results)
