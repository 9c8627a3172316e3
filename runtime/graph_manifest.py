"""What was captured, as JSON: to compare two builds, or to look at a graph without a profiler."""

from collections import Counter
from typing import Any

from torch import Tensor

from .decode_graphs import DecodeGraphs

Manifest = dict[str, Any]


def graph_manifest(graphs: DecodeGraphs) -> Manifest:
    """Of every captured bucket its kernels with their grids, counts of nodes and edges, and its static tensors.

    Byte ranges are given from the start of the tensor's storage: addresses differ from run to run. Kernels are None
    where nobody can tell them (no cuda-bindings).
    """
    buckets = []
    for runner in graphs.runners:
        for key in runner.bucket_keys():
            for index, slot in enumerate(runner.slots(key)):
                counts, nodes = graphs.backend.count_nodes(slot.graph), graphs.backend.nodes(slot.graph)
                kernels = None
                if nodes is not None:
                    same = Counter((node.kind, node.name, node.grid, node.block) for node in nodes)
                    kernels = [
                        {"kind": kind, "name": name, "grid": list(grid), "block": list(block), "count": count}
                        for (kind, name, grid, block), count in sorted(same.items())
                    ]
                buckets.append(
                    {
                        "runner": runner.name,
                        "key_info": "" if key.cg_key_info is None else str(key.cg_key_info),
                        "batch_size": key.bs,
                        "num_tokens": key.num_tokens,
                        "slot": index,
                        "nodes": counts.nodes,
                        "edges": counts.edges,
                        "programmatic_edges": counts.programmatic_edges,
                        "kernels": kernels,
                        "inputs": {name: _facts(tensor) for name, tensor in slot.static_inputs.items()},
                        "outputs": {name: _facts(tensor) for name, tensor in slot.static_outputs.items()},
                    }
                )
    return {"pool_bytes": graphs.backend.pool_bytes(graphs.resources.pool), "buckets": buckets}


def diff_manifests(old: Manifest, new: Manifest) -> list[str]:
    """What differs between two manifests, a sentence each; buckets are matched by runner, key info, sizes and slot."""
    before, after = _by_name(old), _by_name(new)
    lines = [f"{name} is gone" for name in before if name not in after]
    lines += [f"{name} is new" for name in after if name not in before]
    for name in before:
        if name not in after:
            continue
        was, now = before[name], after[name]
        for field in ("num_tokens", "nodes", "edges", "programmatic_edges", "inputs", "outputs"):
            if was[field] != now[field]:
                lines.append(f"{name}: {field} {was[field]} -> {now[field]}")
        lines += [f"{name}: {line}" for line in _diff_kernels(was["kernels"] or [], now["kernels"] or [])]
    return lines


def _diff_kernels(was: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    def counts(kernels: list[dict[str, Any]]) -> Counter[str]:
        return Counter({f"{k['name'] or k['kind']} {k['grid']} x {k['block']}": k["count"] for k in kernels})

    before, after = counts(was), counts(now)
    return [f"{n} fewer of {name}" for name, n in (before - after).items()] + [
        f"{n} more of {name}" for name, n in (after - before).items()
    ]


def _by_name(manifest: Manifest) -> dict[str, dict[str, Any]]:
    return {_name(bucket): bucket for bucket in manifest["buckets"]}


def _name(bucket: dict[str, Any]) -> str:
    size = bucket["batch_size"]
    if bucket["num_tokens"] > size:
        size = f"{size} of {bucket['num_tokens']} tokens"
    return " ".join(str(part) for part in (bucket["runner"], bucket["key_info"], size, bucket["slot"]))


def _facts(tensor: Tensor) -> dict[str, Any]:
    start = tensor.storage_offset() * tensor.element_size()
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "bytes": [start, start + tensor.nbytes]}
