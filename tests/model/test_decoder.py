from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import SINK_BLOCK
from ostinato.model import AttentionMetadata, Decoder, Preamble, RotaryConfig
from ostinato.model.rotary import inverse_frequencies

Error = Callable[[Tensor, Tensor], float]
Make = Callable[..., Decoder]

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# Relative error of logits between two orders of the same sums. float64 and float32: some hundred roundings in sequence,
# each far below one step of the result. bfloat16: three layers with a dozen roundings of 2**-9 each, which add up like
# a random walk.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-2}

VARIANTS: dict[str, dict[str, Any]] = {
    "biases": {},
    "plain, tied": {"attention_bias": False, "output_bias": False, "mlp_bias": False, "tie_embeddings": True},
    "q/k norm": {"qk_norm": "head"},
    "window 5": {"sliding_window": 5},
    "9 query heads, head_dim 6": {"num_heads": 9, "num_kv_heads": 1, "head_dim": 6},
    "norms behind, q/k norm of the whole, multipliers": {
        "qk_norm": "projection",
        "post_norms": True,
        "embedding_multiplier": 3.0,
        "attention_scale": 0.2,
        "residual_multiplier": 0.4,
        "logits_divisor": 7.0,
    },
    "layers that differ, part of a head rotated": {
        "sliding_window": 6,
        "full_layers": (0,),
        "unrotated_layers": (1,),
        "rotary": RotaryConfig("default", 10000.0, 6),
    },
}


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(50, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def dense_logits(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """The whole model once more: float64, dense attention, one head at a time, straight from the published formulas."""
    config = decoder.config
    weight = {name: tensor.cpu().double() for name, tensor in decoder.state_dict().items()}
    num_tokens, dim, part = len(token_ids), config.head_dim, config.rotary.rotary_dim
    positions = torch.arange(num_tokens)
    turn = torch.polar(
        torch.ones(num_tokens, part // 2, dtype=torch.float64), positions[:, None] * inverse_frequencies(config.rotary)
    )
    distance = positions[:, None] - positions
    scale = dim**-0.5 if config.attention_scale is None else config.attention_scale

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight[name]

    def project(x: Tensor, name: str) -> Tensor:
        return x @ weight[f"{name}_weight"].T + weight.get(f"{name}_bias", torch.zeros((), dtype=torch.float64))

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[:, : part // 2], x[:, part // 2 : part]) * turn
        return torch.cat((turned.real, turned.imag, x[:, part:]), -1)

    hidden = weight["embed_weight"][token_ids] * config.embedding_multiplier
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        visible = (distance >= 0) & (distance < (config.window_of(index) or num_tokens))
        normed = hidden if config.post_norms else norm(hidden, f"{layer}input_norm_weight")
        qkv = project(normed, f"{layer}qkv")
        if config.qk_norm == "projection":
            q, k, v = qkv.split((config.q_size, config.kv_size, config.kv_size), -1)
            qkv = torch.cat((norm(q, f"{layer}q_norm_weight"), norm(k, f"{layer}k_norm_weight"), v), -1)
        heads = list(qkv.split(dim, -1))
        queries, keys = heads[: config.num_heads], heads[config.num_heads : config.num_heads + config.num_kv_heads]
        values = heads[config.num_heads + config.num_kv_heads :]
        if config.qk_norm == "head":
            queries = [norm(q, f"{layer}q_norm_weight") for q in queries]
            keys = [norm(k, f"{layer}k_norm_weight") for k in keys]
        context = []
        for head, q in enumerate(queries):
            kv_head = head // (config.num_heads // config.num_kv_heads)
            k = keys[kv_head]
            if index not in config.unrotated_layers:
                q, k = rotate(q), rotate(k)
            scores = q @ k.T * scale
            context.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values[kv_head])
        added = project(torch.cat(context, -1), f"{layer}o")
        added = norm(added, f"{layer}o_norm_weight") if config.post_norms else added
        hidden = hidden + config.residual_multiplier * added
        normed = hidden if config.post_norms else norm(hidden, f"{layer}post_norm_weight")
        gate, up = project(normed, f"{layer}gate_up").chunk(2, -1)
        added = project(gate * torch.sigmoid(gate) * up, f"{layer}down")
        added = norm(added, f"{layer}down_norm_weight") if config.post_norms else added
        hidden = hidden + config.residual_multiplier * added
    return norm(hidden, "norm_weight") @ weight.get("head_weight", weight["embed_weight"]).T / config.logits_divisor


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_equals_a_dense_decoder(
    variant: dict[str, Any], random_decoder: Make, player: Callable[..., Any], relative_error: Error
) -> None:
    """float64 but for the tables, which are float32: their rounding of 3e-8 is what the bound allows for."""
    decoder, ids = random_decoder(torch.float64, **variant), tokens(40)
    expected = dense_logits(decoder, ids)
    (prefilled,) = player(decoder, 1, 40, 5).prefill([ids])
    assert relative_error(prefilled, expected) < 2e-7
    playing = player(decoder, 1, 40, 5)
    decoded = torch.cat([playing.decode([token_id]) for token_id in ids])
    assert relative_error(decoded, expected) < 2e-7


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("block_size", [16, 5])
def test_every_way_to_feed_a_prompt_gives_the_same_logits(
    block_size: int,
    dtype: torch.dtype,
    variant: dict[str, Any],
    random_decoder: Make,
    player: Callable[..., Any],
    relative_error: Error,
) -> None:
    """B60, B35: one prefill, token by token, chunks of 7, 16 cached + 24, across block borders."""
    decoder, ids = random_decoder(dtype, **variant), tokens(40)
    (whole,) = player(decoder, 1, 40, block_size).prefill([ids])
    for cuts in ([0, 16, 40], [*range(0, 40, 7), 40]):
        playing = player(decoder, 1, 40, block_size)
        parts = [playing.prefill([ids[start:stop]])[0] for start, stop in pairwise(cuts)]
        assert relative_error(torch.cat(parts), whole) < TOLERANCE[dtype]
    playing = player(decoder, 1, 40, block_size)
    stepwise = torch.cat([playing.decode([token_id]) for token_id in ids])
    assert relative_error(stepwise, whole) < TOLERANCE[dtype]
    if dtype != torch.bfloat16:
        assert torch.equal(stepwise.argmax(-1), whole.argmax(-1))


def test_a_window_is_seen_once_it_is_full(random_decoder: Make, player: Callable[..., Any]) -> None:
    """B35: W = 4, T = 10: the first four positions know no difference, all later ones do."""
    ids = tokens(10)
    windowed, full = (
        player(random_decoder(torch.float64, sliding_window=window), 1, 10, 4).prefill([ids])[0] for window in (4, None)
    )
    assert torch.equal(windowed[:4], full[:4])
    assert ((windowed[4:] - full[4:]).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_a_sequence_in_a_ragged_batch_equals_itself_alone(
    dtype: torch.dtype, random_decoder: Make, player: Callable[..., Any], relative_error: Error
) -> None:
    """B60: no padding between sequences; prefill of different lengths, chunks beside none, then decode."""
    decoder = random_decoder(dtype)
    prompts, tails = [tokens(n, seed=n) for n in (1, 17, 6, 30)], [tokens(4, seed=100 + n) for n in range(4)]
    together = player(decoder, 4, 40, 5)
    first = together.prefill([prompt[:9] for prompt in prompts])
    second = together.prefill([prompt[9:] for prompt in prompts])
    decoded = torch.stack([together.decode(step) for step in zip(*tails, strict=True)], 1)
    for seq, (prompt, tail) in enumerate(zip(prompts, tails, strict=True)):
        alone = player(decoder, 1, 40, 5)
        (expected,) = alone.prefill([prompt])
        assert relative_error(torch.cat((first[seq], second[seq])), expected) < TOLERANCE[dtype]
        expected = torch.cat([alone.decode([token_id]) for token_id in tail])
        assert relative_error(decoded[seq], expected) < TOLERANCE[dtype]


def test_only_the_slots_of_the_tokens_are_written(random_decoder: Make, player: Callable[..., Any]) -> None:
    """B37: every other byte of all caches, block 0 and the spare block among them, keeps its poison."""
    playing = player(random_decoder(), 2, 20, 5)
    playing.prefill([tokens(7), tokens(11)])
    playing.decode([1, 2])
    written = torch.zeros(playing.cache.num_blocks, 5, dtype=torch.bool)
    written[SINK_BLOCK] = True
    for table, length in zip(playing.tables.tolist(), playing.lengths, strict=True):
        for position in range(length):
            written[table[position // 5], position % 5] = True
    for cache in (*playing.cache.k, *playing.cache.v):
        slots = cache.transpose(1, 2).flatten(2)
        assert slots[written].isfinite().all()
        assert slots[~written].isnan().all()
        assert (cache[SINK_BLOCK] == 0).all()


@pytest.mark.parametrize("block_size", [5, 8])
def test_dead_rows_are_finite_write_to_the_sink_and_change_no_live_bit(
    block_size: int, random_decoder: Make, player: Callable[..., Any]
) -> None:
    """B37: a decode bucket of 4 with 2 live rows; then the dead rows hold other tokens and positions."""
    decoder, results = random_decoder(), []
    for garbage in (0, 49):
        playing = player(decoder, 4, 10, block_size)
        playing.prefill([tokens(6), [], tokens(3), []])
        before = [cache.clone() for cache in (*playing.cache.k, *playing.cache.v)]
        playing.tables[[1, 3]] = SINK_BLOCK
        metadata = AttentionMetadata(playing.tables, torch.tensor([7, 0, 4, 0], dtype=torch.int32))
        ids, positions = torch.tensor([5, garbage, 6, garbage]), torch.tensor([6, garbage, 3, garbage])
        preamble = decoder.preamble(ids, positions, metadata, block_size)
        logits = decoder.head(decoder.blocks(preamble.hidden, preamble, metadata, playing.cache))
        assert logits.isfinite().all()
        results.append(logits[[0, 2]])
        live = [(playing.tables[row, p // block_size].item(), p % block_size) for row, p in ((0, 6), (2, 3))]
        for cache, old in zip((*playing.cache.k, *playing.cache.v), before, strict=True):
            changed = (cache.nan_to_num(7.0) != old.nan_to_num(7.0)).any(-1).any(1)
            changed[SINK_BLOCK] = False
            assert sorted(map(tuple, changed.nonzero().tolist())) == sorted(live)
    assert torch.equal(*results)


def test_padding_tokens_of_a_prefill_write_to_the_sink_and_change_no_live_bit(
    random_decoder: Make, player: Callable[..., Any]
) -> None:
    """B37: tokens past the last query offset, at whatever position."""
    decoder = random_decoder()
    exact, padded = player(decoder, 2, 10, 5), player(decoder, 2, 10, 5)
    expected = torch.cat(exact.prefill([tokens(6), tokens(3)]))
    padded.lengths = [6, 3]
    metadata = padded.metadata([6, 3])
    ids = torch.tensor([*tokens(6), *tokens(3), 49, 0, 0])
    positions = torch.tensor([*range(6), *range(3), 4, 0, 3])
    preamble = decoder.preamble(ids, positions, metadata, 5)
    logits = decoder.head(decoder.blocks(preamble.hidden, preamble, metadata, padded.cache))
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:9], expected, rtol=0.0, atol=1e-5)
    for cache, other in zip((*padded.cache.k, *padded.cache.v), (*exact.cache.k, *exact.cache.v), strict=True):
        same = torch.arange(len(cache)) != SINK_BLOCK
        torch.testing.assert_close(cache[same], other[same], rtol=0.0, atol=1e-5, equal_nan=True)


def test_a_row_that_overshoots_its_context_ends_in_the_sink(random_decoder: Make, player: Callable[..., Any]) -> None:
    """A decode that runs ahead of the host: past the last position and past the table, beside a row that goes on."""
    decoder = random_decoder(max_position=10)
    playing = player(decoder, 2, 10, 5)
    playing.tables = playing.tables[:, :2].contiguous()
    playing.prefill([tokens(9), tokens(3)])
    playing.decode([1, 2])
    before = [cache.clone() for cache in (*playing.cache.k, *playing.cache.v)]
    for _ in range(3):
        assert playing.decode([1, 2]).isfinite().all()
    for cache, old in zip((*playing.cache.k, *playing.cache.v), before, strict=True):
        full_row = playing.tables[0].tolist()
        assert torch.equal(cache[full_row], old[full_row])
        assert cache[0].isnan().all()


# Pieces.


def staged(decoder: Decoder, player: Callable[..., Any], *, decode: bool) -> tuple[Any, Tensor, Tensor, Any]:
    """A player in the middle of two sequences, and the next step's ids, positions and metadata."""
    playing = player(decoder, 2, 20, 5)
    playing.prefill([tokens(6), tokens(4)])
    counts = [1, 1] if decode else [3, 8]
    starts = playing.lengths
    playing.lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    metadata = playing.metadata(None if decode else counts)
    return playing, torch.tensor(tokens(len(positions), seed=9)), torch.tensor(positions), metadata


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_a_cut_at_any_layer_changes_no_bit(
    dtype: torch.dtype,
    decode: bool,
    random_decoder: Make,
    player: Callable[..., Any],
    nan_poison: Callable[..., Tensor],
) -> None:
    """Every way to cut three layers; what crosses a cut lies in a buffer of the caller, and `hidden` is only read."""
    decoder = random_decoder(dtype)
    results, caches = [], []
    for cuts in ([0, 3], [0, 1, 3], [0, 2, 3], [0, 1, 2, 3]):
        playing, ids, positions, metadata = staged(decoder, player, decode=decode)
        preamble = decoder.preamble(ids, positions, metadata, 5)
        hidden = preamble.hidden
        for start, stop in pairwise(cuts):
            boundary, before = nan_poison(len(ids), 24, dtype=dtype), hidden.clone()
            assert decoder.blocks(hidden, preamble, metadata, playing.cache, start, stop, out=boundary) is boundary
            assert torch.equal(hidden, before)
            hidden = boundary
        results.append(decoder.head(hidden))
        caches.append(torch.stack((*playing.cache.k, *playing.cache.v)).nan_to_num(7.0))
    assert all(torch.equal(result, results[0]) for result in results)
    assert all(torch.equal(cache, caches[0]) for cache in caches)


def test_the_residual_stream_has_one_buffer(random_decoder: Make, player: Callable[..., Any]) -> None:
    """Of its own, so that the input is only read; nothing is copied between layers."""
    decoder = random_decoder(torch.float32)
    playing, ids, positions, metadata = staged(decoder, player, decode=True)
    preamble = decoder.preamble(ids, positions, metadata, 5)
    before, places = preamble.hidden.clone(), []
    for layer in decoder.layers:
        layer.register_forward_hook(lambda _layer, _args, hidden: places.append(hidden.data_ptr()))
    assert decoder.blocks(preamble.hidden, preamble, metadata, playing.cache).data_ptr() == places[0]
    assert places == places[:1] * 3
    assert torch.equal(preamble.hidden, before)


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_out_of_every_piece_is_the_caller_s_buffer(
    dtype: torch.dtype,
    decode: bool,
    random_decoder: Make,
    player: Callable[..., Any],
    nan_poison: Callable[..., Tensor],
) -> None:
    """Buffers are slices of those of a larger bucket, poisoned; rows beyond the batch keep their poison."""
    decoder = random_decoder(dtype)
    playing, ids, positions, metadata = staged(decoder, player, decode=decode)
    free = decoder.preamble(ids, positions, metadata, 5)
    n = len(ids)
    buffers = Preamble(
        nan_poison(n + 2, 24, dtype=dtype),
        nan_poison(n + 2, 5),
        nan_poison(n + 2, 5),
        nan_poison(n + 2, dtype=torch.int64),
    )
    out = Preamble(*(buffer[:n] for buffer in buffers))
    owned = decoder.preamble(ids, positions, metadata, 5, out=out)
    for mine, theirs, buffer in zip(owned, free, buffers, strict=True):
        assert mine.data_ptr() == buffer.data_ptr()
        assert torch.equal(mine, theirs)
        assert (buffer[n:].isnan() if buffer.is_floating_point() else buffer[n:] < 0).all()
    hidden = decoder.blocks(free.hidden, free, metadata, playing.cache)
    boundary = nan_poison(n + 2, 24, dtype=dtype)
    assert torch.equal(decoder.blocks(owned.hidden, owned, metadata, playing.cache, out=boundary[:n]), hidden)
    assert torch.equal(boundary[:n], hidden)
    assert boundary[n:].isnan().all()
    logits = nan_poison(n + 2, 50, dtype=dtype)
    assert torch.equal(decoder.head(boundary[:n], out=logits[:n]), decoder.head(hidden))
    assert torch.equal(logits[:n], decoder.head(hidden))
    assert logits[n:].isnan().all()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (1, 1), (2, 1), (0, 4), (3, None)])
def test_a_range_without_layers_is_refused(
    start: int, stop: int | None, random_decoder: Make, player: Callable[..., Any]
) -> None:
    decoder = random_decoder()
    playing, ids, positions, metadata = staged(decoder, player, decode=True)
    preamble = decoder.preamble(ids, positions, metadata, 5)
    with pytest.raises(AssertionError, match="range of layers"):
        decoder.blocks(preamble.hidden, preamble, metadata, playing.cache, start, stop)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("biased", [False, True], ids=["no biases", "biases"])
def test_names_and_shapes_of_the_parameters(tied: bool, biased: bool, random_decoder: Make) -> None:
    """What the loaders fill; 6 query heads and 2 KV heads of 10, hidden 24, intermediate 40, vocabulary 50."""
    decoder = random_decoder(
        attention_bias=biased, output_bias=biased, mlp_bias=biased, tie_embeddings=tied, num_layers=1
    )
    expected = {
        "embed_weight": (50, 24),
        "layers.0.input_norm_weight": (24,),
        "layers.0.qkv_weight": (100, 24),
        "layers.0.o_weight": (24, 60),
        "layers.0.post_norm_weight": (24,),
        "layers.0.gate_up_weight": (80, 24),
        "layers.0.down_weight": (24, 40),
        "norm_weight": (24,),
    }
    if biased:
        sizes = {"qkv": 100, "o": 24, "gate_up": 80, "down": 24}
        expected |= {f"layers.0.{name}_bias": (size,) for name, size in sizes.items()}
    if not tied:
        expected["head_weight"] = (50, 24)
    assert {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()} == expected


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=named)
def test_on_a_gpu(
    dtype: torch.dtype, variant: dict[str, Any], random_decoder: Make, player: Callable[..., Any], relative_error: Error
) -> None:
    """Prefill of two sequences and a decode, against the dense float64 decoder with the same (rounded) weights.

    float64 and float32 are bound by the rounding of the tables and of the sums; TF32, if it crept in, would be at 1e-3.
    """
    decoder, prompts = random_decoder(dtype, "cuda", **variant), [tokens(23), tokens(9, seed=1)]
    playing = player(decoder, 2, 40, 5)
    prefilled = playing.prefill([prompt[:-1] for prompt in prompts])
    decoded = playing.decode([prompt[-1] for prompt in prompts])
    bound = {torch.float64: 2e-7, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    for seq, prompt in enumerate(prompts):
        actual = torch.cat((prefilled[seq], decoded[seq : seq + 1]))
        assert relative_error(actual, dense_logits(decoder, prompt)) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 50}, {"qk_norm": "head"}], ids=["plain", "window", "norms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
def test_every_way_to_feed_a_prompt_to_the_kernels(
    dtype: torch.dtype, fields: dict[str, Any], random_decoder: Make, player: Callable[..., Any], relative_error: Error
) -> None:
    """Whole, in long and in short chunks, token by token: heads of a size that the kernels are built for."""
    sizes = {"head_dim": 64, "hidden_size": 96, "num_heads": 8, "max_position": 256}
    decoder, exact = (random_decoder(kind, "cuda", **sizes, **fields) for kind in (dtype, torch.float64))
    for parameter, same in zip(decoder.parameters(), exact.parameters(), strict=True):
        same.copy_(parameter)
    prompts = [tokens(200), tokens(90, seed=1)]
    truth = torch.cat(player(exact, 2, 256, 16).prefill(prompts))
    for cuts in ([0, 200], [0, 64, 65, 140, 200], [*range(0, 200, 5), 200]):
        playing = player(decoder, 2, 256, 16)
        parts = [playing.prefill([prompt[a:b] for prompt in prompts]) for a, b in pairwise(cuts)]
        logits = torch.cat([torch.cat(chunks) for chunks in zip(*parts, strict=True)])
        assert relative_error(logits, truth) < TOLERANCE[dtype]
    playing = player(decoder, 1, 256, 16)
    stepwise = torch.cat([playing.decode([token_id]) for token_id in prompts[1]])
    assert relative_error(stepwise, truth[200:]) < TOLERANCE[dtype]
