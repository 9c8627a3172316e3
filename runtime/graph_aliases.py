"""Proof from the allocator's own books that nothing which must outlive a replay can be overwritten by one."""

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor

from .decode_graphs import DecodeGraphs
from .graph_capture import aliased_outputs
from .piecewise_runner import PiecewiseCudaGraphRunner


def find_aliases(graphs: DecodeGraphs) -> list[str]:
    """A sentence for each tensor that a replay may overwrite though it is not that replay's own output.

    Weights, KV cache, step state, sampling rows, static inputs and outputs must lie outside the pool; and of the
    regions of one step, no two may write to the same bytes. Block regions that are cut three times or more take two
    buffers in turns, so of them only neighbours are compared.
    """
    found = [f"{name} lies in the graphs' pool" for name in aliased_outputs(graphs.resources.pool, lasting(graphs))]
    for config in graphs.configs:
        for key in config.bucket_keys():
            regions = graphs.regions_of(key)
            outputs = [(region.label, name, t) for region in regions for name, t in region.outputs(key.bs).items()]
            found += [
                f"{label} and {other} both write to {name} at batch size {key.bs}"
                for (label, name, mine), (other, _, theirs) in itertools.combinations(outputs, 2)
                if label != other and _overlap(mine, theirs) and not _take_turns(graphs.step.blocks, label, other)
            ]
    return list(dict.fromkeys(found))


def lasting(graphs: DecodeGraphs) -> dict[str, Tensor]:
    """Everything whose bytes must survive replays that do not write it, by name."""
    pieces = graphs.pieces
    tensors: dict[str, Tensor] = {f"weight {name}": weight for name, weight in pieces.model.state_dict().items()}
    tensors |= {"rotary cos": pieces.model.cos, "rotary sin": pieces.model.sin}
    for letter, caches in (("k", pieces.kv_cache.k), ("v", pieces.kv_cache.v)):
        tensors |= {f"{letter} cache of layer {i}": cache for i, cache in enumerate(caches)}
    tensors |= _numbered("step state", pieces.state.device_tensors())
    tensors |= _numbered("sampling state", pieces.sampler.device_tensors())
    tensors |= {f"buffer {name}": buffer for name, buffer in graphs.resources.buffers.tensors.items()}
    for runner in graphs.runners:
        for key in runner.bucket_keys():
            where = f"of {runner.name} at batch size {key.bs}" + (f", {key.cg_key_info}" if key.cg_key_info else "")
            for slot in runner.slots(key):
                tensors |= {f"input {name} {where}": tensor for name, tensor in slot.static_inputs.items()}
                tensors |= {f"output {name} {where}": tensor for name, tensor in slot.static_outputs.items()}
    return tensors


def _numbered(name: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {f"{name} {index}": tensor for index, tensor in enumerate(tensors)}


def _overlap(a: Tensor, b: Tensor) -> bool:
    def ends(tensor: Tensor) -> tuple[int, int]:
        assert tensor.is_contiguous(), "an output buffer is in one piece"
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    (a_start, a_stop), (b_start, b_stop) = ends(a), ends(b)
    return max(a_start, b_start) < min(a_stop, b_stop)


def _take_turns(blocks: Sequence[PiecewiseCudaGraphRunner], label: str, other: str) -> bool:
    labels = [region.label for region in blocks]
    return label in labels and other in labels and abs(labels.index(label) - labels.index(other)) > 1
