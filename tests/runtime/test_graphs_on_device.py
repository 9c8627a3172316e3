"""Graphs of real shapes on a GPU: the same bits as without, in any order, over poisoned memory, again and again."""

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import FIRST_BLOCK, SINK_BLOCK
from ostinato.model import SHAPES, Decoder
from ostinato.model.decoder import Preamble
from ostinato.runtime import Engine, EngineConfig, Reason, SamplingParams, Sequence
from ostinato.runtime.decode_graphs import DecodeGraphs
from ostinato.runtime.graph_aliases import find_aliases
from ostinato.runtime.step_state import RowUpdate
from ostinato.weights import dummy_model

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8, 16, 32)
FEATURES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=6),
    "random": SamplingParams(temperature=0.9, seed=3, top_k=200, top_p=0.95, min_p=0.001, max_tokens=6),
    "everything": SamplingParams(
        temperature=0.8,
        seed=9,
        repetition_penalty=1.2,
        frequency_penalty=0.2,
        logit_bias={5: 2.0},
        min_tokens=4,
        stop_token_ids=[7],
        logprobs=True,
        top_logprobs=4,
        max_tokens=6,
    ),
}


@pytest.fixture(scope="module", params=["smollm2-135m", "llama-3.2-1b"])
def model(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    yield dummy_model(SHAPES[request.param], dtype=torch.bfloat16, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def engine(model: Decoder) -> Iterator[Callable[..., Engine]]:
    """`engine(**config)`, made once for each config."""
    made: dict[str, Engine] = {}

    def get(**config: Any) -> Engine:
        name = str(config)
        if name not in made:
            sizes = {"max_num_seqs": 32, "max_model_len": 512, "block_size": 16, "capture_sizes": SIZES}
            config = {"graphs": "whole", "prompt_capture_sizes": (), "kv_cache_memory_bytes": 1 << 30} | sizes | config
            made[name] = Engine(model, EngineConfig(**config), tokenizer=None, eos_token_ids=())
        return made[name]

    yield get
    made.clear()


def requests(num: int, params: SamplingParams) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(num)
    return [([draw.randrange(40000) for _ in range(draw.randint(1, 70))], params) for _ in range(num)]


def run(engine: Engine, batch: list[Any], between: Callable[[], None] = lambda: None) -> list[Sequence]:
    sequences = [s for prompt, params in batch for s in engine.create(prompt, params)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        between()
    return sequences


def results(sequences: list[Sequence]) -> list[Any]:
    return [(one.output_ids, one.logprobs) for one in sequences]


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    return graphs


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 13, 32])
def test_eager_on_bucket_is_piecewise_is_whole(engine: Callable[..., Engine], num_rows: int, feature: str) -> None:
    """Bitwise: tokens, log-probabilities, KV cache and step state."""
    runs = {}
    for name, config in {
        "eager": {"enable_decode_graphs": False},
        "whole": {},
        "piecewise": {"graphs": "piecewise"},
    }.items():
        one = engine(**config)
        assert graphs_of(one).drops() == []
        caches = (*one._runner._pieces.kv_cache.k, *one._runner._pieces.kv_cache.v)
        with torch.inference_mode():
            for cache in caches:
                cache[FIRST_BLOCK:] = 0.0
        outputs = results(run(one, requests(num_rows, FEATURES[feature])))
        state = [cache[FIRST_BLOCK:] for cache in caches] + one._runner._state.row_tensors()
        runs[name] = outputs, [tensor.clone() for tensor in state]
    for name, (outputs, state) in runs.items():
        assert outputs == runs["eager"][0], name
        assert all(torch.equal(mine, exact) for mine, exact in zip(state, runs["eager"][1], strict=True)), name
        assert all(tensor.isfinite().all() for tensor in state), name
    assert engine().decode_runner.counters.num_eager_decodes == 0


def test_regions_of_a_step_replay_in_random_order(engine: Callable[..., Engine]) -> None:
    """1,000 replays over all regions and buckets, on new inputs each: bitwise what the region's Python computes, and
    what other regions handed out last stays as it is."""
    one = engine(graphs="piecewise")
    graphs, pieces = graphs_of(one), graphs_of(one).pieces
    buffers, state, draw = graphs.resources.buffers, pieces.state, random.Random(0)
    state.write_rows(
        [
            RowUpdate(row, 3 * row, 40 + 7 * row, 41 + 7 * row, [FIRST_BLOCK + 32 * row + i for i in range(32)])
            for row in range(32)
        ]
    )
    for cache in (*pieces.kv_cache.k, *pieces.kv_cache.v):
        cache.normal_()
    regions = graphs.regions
    wrong: list[Tensor] = []  # looked at once: beside other processes each look takes their turns, too
    compared: list[tuple[int, str, int, str, str]] = []
    kept: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    names = ("blocks.in", "preamble.cos", "preamble.sin", "preamble.slot_mapping")
    with torch.inference_mode():
        for number in range(1000):
            region, size = draw.choice(regions), draw.choice(SIZES)
            [key] = [key for key in region.bucket_keys() if key.bs == size]
            [slot] = region.slots(key)
            pieces.preamble(size, out=Preamble(*(buffers.get(name, size) for name in names)))
            for name, tensor in slot.static_inputs.items():
                if name in ("hidden", "logits"):
                    tensor.normal_()
                    kept = {label: one for label, one in kept.items() if not _shares(tensor, one[0])}
            before = [tensor.clone() for tensor in (*state.device_tensors(), *pieces.sampler.row_tensors())]

            def restore(before: list[Tensor] = before) -> None:
                for tensor, value in zip((*state.device_tensors(), *pieces.sampler.row_tensors()), before, strict=True):
                    tensor.copy_(value)

            exact = region.run_eager(slot.static_inputs, size, size)
            expected = {name: exact[name] for name in exact}
            restore()
            for output in slot.static_outputs.values():
                output.fill_(-1 if not output.is_floating_point() else torch.nan)
                kept = {label: one for label, one in kept.items() if not _shares(output, one[0])}
            region.run(slot.static_inputs, real_bs=size)
            restore()
            kept[region.label] = slot.static_outputs, expected
            for label, (outputs, values) in kept.items():
                wrong += [(outputs[name] != value).any() for name, value in values.items()]
                compared += [(number, region.label, size, label, name) for name in values]
    assert len(compared) > 2000
    assert [what for what, differs in zip(compared, torch.stack(wrong).tolist(), strict=True) if differs] == []
    state.clear_rows(list(range(32)))


def _shares(tensor: Tensor, outputs: dict[str, Tensor]) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return any(output.untyped_storage().data_ptr() == address for output in outputs.values())


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_nothing_that_outlives_a_replay_lies_in_the_pool(engine: Callable[..., Engine], mode: str) -> None:
    graphs = graphs_of(engine(graphs=mode))
    assert graphs.backend.pool_bytes(graphs.resources.pool) > 0
    assert find_aliases(graphs) == []


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_poison_changes_no_token(engine: Callable[..., Engine], mode: str) -> None:
    """NaN over the whole pool, every claimed buffer, the sink and the canary block, garbage in dead rows and in table
    columns without a block, between any two steps."""
    one, params = engine(graphs=mode), SamplingParams(temperature=0.8, seed=5, top_p=0.9, max_tokens=12)
    graphs, state = graphs_of(one), one._runner._state
    exact = results(run(one, requests(11, params)))

    @torch.inference_mode()
    def poison() -> None:
        graphs.backend.fill_pool(graphs.resources.pool, 0xFF)
        for buffer in graphs.resources.buffers.tensors.values():
            buffer.fill_(torch.nan if buffer.is_floating_point() else 7)
        for cache in (*one._runner._pieces.kv_cache.k, *one._runner._pieces.kv_cache.v):
            cache[:FIRST_BLOCK] = torch.nan
        dead = state.seq_lens == 0
        state.token_ids[dead], state.positions[dead] = 12345, 300
        state.block_tables[(state.block_tables == SINK_BLOCK) & ~dead[:, None]] = 0

    assert results(run(one, requests(11, params), poison)) == exact
    with torch.inference_mode():
        for cache in (*one._runner._pieces.kv_cache.k, *one._runner._pieces.kv_cache.v):
            assert cache[0].isnan().all(), "nobody writes to the canary"
            cache[:FIRST_BLOCK] = 0.0
    state.clear_rows(list(range(32)))


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_allocations_between_steps_change_no_token(engine: Callable[..., Engine], mode: str) -> None:
    """50 steps; between them tensors come and go, and the allocator gives back what it holds."""
    one, params, draw = engine(graphs=mode), SamplingParams(temperature=0.0, max_tokens=51), random.Random(1)
    exact = results(run(one, requests(5, params)))
    held: list[Tensor] = []

    def churn() -> None:
        held.extend(torch.full((draw.randint(1, 1 << 22),), torch.nan, device="cuda") for _ in range(4))
        draw.shuffle(held)
        del held[: len(held) // 2]
        torch.cuda.empty_cache()

    assert results(run(one, requests(5, params), churn)) == exact


def test_a_batch_above_the_largest_graph_is_split(model: Decoder) -> None:
    one = Engine(
        model,
        EngineConfig(max_num_seqs=7, max_model_len=256, kv_cache_memory_bytes=1 << 28, capture_sizes=(1, 4)),
        tokenizer=None,
        eos_token_ids=(),
    )
    graphs, batch = graphs_of(one), requests(7, FEATURES["random"])
    exact = results(run(one, batch))
    for key in graphs.whole.bucket_keys():
        if key.bs == 7:
            graphs.whole.drop(key, Reason.OVER_BUDGET, "for a test")
    run(one, batch)
    assert one.decode_runner.counters.by_reason[Reason.SPLIT] == 2 * (FEATURES["random"].max_tokens or 0) - 2
    assert len(exact) == 7


def test_other_threads_work_while_graphs_are_captured(model: Decoder) -> None:
    """Copies from pinned memory, allocations and synchronisations of another thread break no capture."""
    stop, rounds = threading.Event(), [0]

    def work() -> None:
        stream = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(stream):
                torch.ones(1 << 16, pin_memory=True).to("cuda", non_blocking=True).sum()
            stream.synchronize()
            rounds[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}
        one = Engine(model, EngineConfig(**sizes), tokenizer=None, eos_token_ids=())
    finally:
        stop.set()
        thread.join()
    assert graphs_of(one).drops() == []
    assert rounds[0] > 10
