"""The alias checker names whatever lies where a replay may overwrite it, each kind of tensor by its own."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ostinato.model import Decoder
from ostinato.runtime import Engine, Path, Reason, SamplingParams, Sequence, cuda_graph_runner, decode_pieces
from ostinato.runtime.decode_graphs import DecodeGraphs
from ostinato.runtime.graph_aliases import find_aliases, lasting
from ostinato.runtime.graph_capture import capture_into_graph

Make = Callable[..., Engine]


@pytest.fixture
def engine(make_engine: Make, tiny_decoder: Callable[..., Decoder], device: str) -> Make:
    def make(**config: Any) -> Engine:
        sizes = {"max_num_seqs": 2, "capture_sizes": (2,), "graphs": "piecewise", "max_model_len": 64}
        return make_engine(tiny_decoder(device), **(sizes | config))

    return make


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    return graphs


def found_where(graphs: DecodeGraphs, tensor: Tensor) -> list[str]:
    """What the checker says if the pool reached to one byte of a tensor, the last one."""
    last = tensor.data_ptr() + tensor.nbytes - 1
    with mock.patch.object(graphs.backend, "pool_ranges", return_value=[range(last, last + 1)]):
        return find_aliases(graphs)


def test_each_kind_of_tensor_is_found_in_the_pool(engine: Make) -> None:
    one = engine(prompt_capture_sizes=(4,))
    graphs = graphs_of(one)
    assert graphs.prompts is not None
    [key] = graphs.prompts.bucket_keys()
    assert graphs.capture_bucket(Path.WHOLE, key)
    pieces, buffers = graphs.pieces, graphs.resources.buffers
    planted = {
        "weight norm_weight": pieces.model.norm_weight,
        "rotary cos": pieces.model.cos,
        "rotary sin": pieces.model.sin,
        "k cache of layer 1": pieces.kv_cache.k[1],
        "v cache of layer 0": pieces.kv_cache.v[0],
        "buffer blocks.cut.1": buffers.get("blocks.cut.1", 2),
        "input hidden of decode.head": buffers.get("blocks.out", 2),
        "output token_ids of decode.sample.0": buffers.get("sample.token_ids", 2),
        "input numbers of prefill": buffers.get("prompt.numbers", 12),
        "output logits of prefill": buffers.get("prompt.logits", 1),
    }
    for name, tensor in planted.items():
        assert any(line.startswith(name) for line in found_where(graphs, tensor)), name
    assert find_aliases(graphs) == []


def test_no_tensor_of_the_rows_is_forgotten(engine: Make) -> None:
    """Whatever step state and sampler hold, what only the host reads aside."""
    graphs = graphs_of(engine())
    state, sampler = vars(graphs.pieces.state), vars(graphs.pieces.sampler)
    held = [value for name, value in (state | sampler).items() if isinstance(value, Tensor) and name != "_sampled"]
    held += [*(graphs.pieces.sampler.claim_counts())]
    held += [t for name in ("_workspace", "_logprobs_workspace") for t in vars(sampler[name] or object).values()
             if isinstance(t, Tensor)]  # fmt: skip
    known = {tensor.data_ptr() for tensor in lasting(graphs).values()}
    assert len(held) >= 14
    assert all(tensor.data_ptr() in known for tensor in held)


def test_regions_that_write_to_the_same_bytes_are_found(engine: Make) -> None:
    one = engine()
    graphs = graphs_of(one)
    head, [blocks] = graphs.step.head, graphs.step.blocks
    [shared] = blocks.outputs(2).values()
    for outputs in ({"logits": shared}, {"logits": shared[1:]}):
        with mock.patch.object(head, "outputs", lambda bs, outputs=outputs: outputs):
            found = find_aliases(graphs)
        assert found == [f"{blocks.label} and head both write to hidden at batch size 2"]


def test_neighbours_in_a_cut_stack_must_not_share_a_buffer(make_engine: Make, model_config: Any, device: str) -> None:
    """With three cuts the first region and the third take the same one, in turns: that is no finding."""
    model = Decoder(model_config(num_layers=4), dtype=torch.float32, device=device)
    one = make_engine(model, max_num_seqs=2, capture_sizes=(2,), graphs="piecewise", max_model_len=64)
    graphs = graphs_of(one)
    graphs.recut((1, 2, 3))
    key = graphs.configs[0].bucket_keys()[0]
    assert graphs.capture_bucket(Path.PIECEWISE, key)
    assert find_aliases(graphs) == []
    first, second, third, _ = graphs.step.blocks
    assert first.outputs(2)["hidden"].data_ptr() == third.outputs(2)["hidden"].data_ptr()
    with mock.patch.object(second, "outputs", first.outputs):
        assert any("both write to hidden" in line for line in find_aliases(graphs))
    assert graphs.recut(())
    assert not any(region.any_graphs for region in (first, second, third)), "those that are gone hold no memory"


@pytest.mark.parametrize("what", ["a lazy bucket", "a prompt"])
def test_a_late_capture_whose_output_lies_in_the_pool_is_not_used(
    engine: Make, generate: Callable[..., list[Sequence]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def leave_in_pool(run: Any, warm_outputs: Any, pool: Any, device: Any, autocast_dtype: Any) -> Any:
        return capture_into_graph(run, pool, device, autocast_dtype)

    params = SamplingParams(temperature=0.0, max_tokens=6)
    [expected] = generate(engine(graphs="off"), ([1, 2, 3], params))
    one = engine(graphs="whole", capture="lazy", graph_warmup_steps=1, prompt_capture_sizes=(4,))
    graphs = graphs_of(one)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graph_runner, "capture_with_static_outputs", leave_in_pool)
        if what == "a lazy bucket":
            patch.setattr(decode_pieces, "sampled_buffers", lambda buffers, rows, road: None)
        else:
            get = graphs.resources.buffers.get
            patch.setattr(
                graphs.resources.buffers, "get", lambda name, rows: None if name == "prompt.logits" else get(name, rows)
            )
        tokens = [generate(one, ([1, 2, 3], params))[0].output_ids for _ in range(2)]
    assert tokens == [expected.output_ids] * 2
    counters = one.decode_runner.counters
    counts = counters.by_reason if what == "a lazy bucket" else counters.prompts
    assert counts[Reason.ALIASED] > 0
    assert counts[Reason.WHOLE if what == "a lazy bucket" else Reason.PROMPT] == 0
    assert all("lies in the graphs' pool" in line for line in graphs.drops())
