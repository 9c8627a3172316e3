import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.model import SHAPES, Decoder, ModelConfig, RotaryConfig
from ostinato.model.rotary import POSITIONS_AT_ONCE, inverse_frequencies, rotary_tables

KINDS = [
    RotaryConfig("default", 10000.0, 64),
    RotaryConfig("default", 500000.0, 80),
    RotaryConfig("linear", 10000.0, 96, factor=4.0),
    RotaryConfig("llama3", 500000.0, 64, 32.0, 1.0, 4.0, 8192),
    RotaryConfig("dynamic", 10000.0, 64, factor=4.0),
    RotaryConfig("yarn", 1e6, 128, 4.0, original_max_position=32768, attention_factor=0.1 * math.log(4.0) + 1.0),
    RotaryConfig("yarn", 10000.0, 48, 16.0, original_max_position=512, beta_fast=16.0, beta_slow=2.0, truncate=False),
    RotaryConfig(
        "longrope",
        10000.0,
        8,
        original_max_position=4096,
        attention_factor=1.19,
        short_factors=(1.0, 1.1, 1.2, 1.3),
        long_factors=(1.0, 2.5, 20.0, 60.0),
    ),
]
KIND_IDS = ["default", "theta 5e5", "linear", "llama3", "dynamic", "yarn", "yarn, bounds not rounded", "longrope"]
CONTEXT = 16000


def exact_frequency(rotary: RotaryConfig, pair: int) -> float:
    """Radians per position, by the published formulas, written with wavelengths as the Llama 3.1 release has them."""
    frequency = math.exp(-math.log(rotary.theta) * 2 * pair / rotary.rotary_dim)
    if rotary.kind == "linear":
        return frequency / rotary.factor
    if rotary.kind in ("default", "dynamic"):
        return frequency
    if rotary.kind == "longrope":
        return frequency / rotary.long_factors[pair]
    if rotary.kind == "yarn":
        # YaRN, arXiv 2309.00071: where a pair lies between those that turn beta_fast and beta_slow times.
        fast, slow = (
            rotary.rotary_dim * math.log(rotary.original_max_position / (turns * 2 * math.pi), rotary.theta) / 2
            for turns in (rotary.beta_fast, rotary.beta_slow)
        )
        if rotary.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        ramp = min(1.0, max(0.0, (pair - fast) / (slow - fast)))
        return ramp * frequency / rotary.factor + (1 - ramp) * frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < rotary.original_max_position / rotary.high_freq_factor:
        return frequency
    if wavelength > rotary.original_max_position / rotary.low_freq_factor:
        return frequency / rotary.factor
    smooth = rotary.original_max_position / wavelength - rotary.low_freq_factor
    smooth /= rotary.high_freq_factor - rotary.low_freq_factor
    return (1 - smooth) * frequency / rotary.factor + smooth * frequency


@pytest.mark.parametrize("rotary", KINDS, ids=KIND_IDS)
def test_frequencies_equal_the_formula(rotary: RotaryConfig) -> None:
    frequencies = inverse_frequencies(rotary, CONTEXT)
    assert frequencies.dtype == torch.float64
    exact = [exact_frequency(rotary, pair) for pair in range(rotary.rotary_dim // 2)]
    torch.testing.assert_close(frequencies, torch.tensor(exact, dtype=torch.float64), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize(("theta", "expected"), [(1e6, 0.805842), (1e4, 0.865964)])
def test_the_second_frequency(theta: float, expected: float) -> None:
    """B08: head_dim 128."""
    assert round(inverse_frequencies(RotaryConfig("default", theta, 128))[1].item(), 6) == expected


@pytest.mark.parametrize(
    ("head_dim", "factor", "unchanged", "blended"),
    [
        (64, 32.0, 15, {15: 0.605573, 16: 0.303743, 17: 0.103448}),
        (128, 8.0, 29, {29: 0.828168, 34: 0.190211}),
    ],
    ids=["head_dim 64, factor 32", "head_dim 128, factor 8"],
)
def test_ratios_of_llama3(head_dim: int, factor: float, unchanged: int, blended: dict[int, float]) -> None:
    """B07: high frequencies stay, low ones are divided by the factor, those between are blended."""
    scaled = inverse_frequencies(RotaryConfig("llama3", 500000.0, head_dim, factor, 1.0, 4.0, 8192))
    ratios = scaled / inverse_frequencies(RotaryConfig("default", 500000.0, head_dim))
    first_divided = max(blended) + 1
    assert (ratios[:unchanged] == 1.0).all()
    assert {pair: round(ratios[pair].item(), 6) for pair in blended} == blended
    assert ((ratios[unchanged:first_divided] < 1.0) & (ratios[unchanged:first_divided] > 1 / factor)).all()
    torch.testing.assert_close(
        ratios[first_divided:], torch.full_like(ratios[first_divided:], 1 / factor), rtol=1e-14, atol=0.0
    )


def test_linear_divides_every_frequency() -> None:
    """B06: factor 4; position 4 p turns as p did."""
    plain, scaled = RotaryConfig("default", 1e4, 64), RotaryConfig("linear", 1e4, 64, factor=4.0)
    assert torch.equal(inverse_frequencies(scaled), inverse_frequencies(plain) / 4)
    for long, short in zip(rotary_tables(scaled, 4001, "cpu"), rotary_tables(plain, 1001, "cpu"), strict=True):
        torch.testing.assert_close(long[::4], short, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("rotary", KINDS, ids=KIND_IDS)
def test_tables_are_exact_to_their_last_bit_and_tell_neighbours_apart(rotary: RotaryConfig) -> None:
    """B58: at the positions where a bf16 or float32 angle would be off, and between all neighbours."""
    num_positions = CONTEXT
    cos, sin = rotary_tables(rotary, num_positions, "cpu")
    for table in (cos, sin):
        assert table.shape == (num_positions, rotary.rotary_dim // 2)
        assert table.dtype == torch.float32
        # The fastest pair always moves on; the slower ones may keep their bits.
        assert (table[1:] != table[:-1]).any(-1).all()
    for position in (0, 1, 257, 4097, 8191, 15962):
        for pair in range(rotary.rotary_dim // 2):
            angle = position * exact_frequency(rotary, pair)
            assert abs(cos[position, pair].item() / rotary.attention_factor - math.cos(angle)) < 1e-7
            assert abs(sin[position, pair].item() / rotary.attention_factor - math.sin(angle)) < 1e-7


def test_yarn_multiplies_both_tables() -> None:
    """B06: factor 4, no explicit attention factor."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4000}
    cos, sin = make(rope_scaling=scaling).cos, make(rope_scaling=scaling).sin
    torch.testing.assert_close((cos.square() + sin.square()).sqrt(), torch.full_like(cos, 1.138629), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("context", "factors"), [(4096, "short_factors"), (4097, "long_factors"), (1, "short_factors")]
)
def test_the_context_chooses_the_factors_of_longrope(context: int, factors: str) -> None:
    rotary = KINDS[-1]
    expected = inverse_frequencies(RotaryConfig("default", 10000.0, 8)) / torch.tensor(getattr(rotary, factors))
    torch.testing.assert_close(inverse_frequencies(rotary, context), expected.double(), rtol=1e-7, atol=0.0)


def test_yarn_whose_bounds_meet() -> None:
    """The pairs on either side are kept or divided; nothing is NaN."""
    rotary = RotaryConfig("yarn", 10000.0, 16, 4.0, original_max_position=64, beta_fast=4.0, beta_slow=4.0)
    rotary = replace(rotary, truncate=False)
    ratios = inverse_frequencies(rotary) / inverse_frequencies(RotaryConfig("default", 10000.0, 16))
    assert set(ratios.tolist()) == {1.0, 0.25}


def test_a_shorter_context_has_shorter_tables() -> None:
    config = make().config
    assert Decoder(config, dtype=torch.float32, device="meta", context=100).cos.shape[0] == 100
    assert Decoder(config, dtype=torch.float32, device="meta", context=10**9).cos.shape[0] == config.max_position


def test_tables_on_another_device_are_the_same_kind() -> None:
    cos, sin = rotary_tables(KINDS[0], 5, "meta")
    assert (cos.device.type, cos.dtype, sin.shape) == ("meta", torch.float32, (5, 32))


def make(**changes: Any) -> Decoder:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 16000,
            **changes,
        }
    )
    return Decoder(config, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "double"])
def test_a_cast_of_the_whole_model_leaves_the_tables_alone(cast: str) -> None:
    """B58: in bf16 position 257 would become 256, and 15962 would become 15936."""
    decoder = make()
    before = decoder.cos.clone(), decoder.sin.clone()
    moved = decoder.to(torch.bfloat16) if cast == "to" else getattr(decoder, cast)()
    assert moved.embed_weight.dtype != torch.float32
    assert torch.equal(moved.cos, before[0])
    assert torch.equal(moved.sin, before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_made_in_half_precision_has_the_same_tables(dtype: torch.dtype) -> None:
    """B58, as checkpoints are loaded: bf16 tables pass the 1.5x rule, since transformers' own are bf16."""
    config = make().config
    exact, half = (Decoder(config, dtype=chosen, device="cpu") for chosen in (torch.float32, dtype))
    assert half.cos.dtype == half.sin.dtype == torch.float32
    assert torch.equal(half.cos, exact.cos)
    assert torch.equal(half.sin, exact.sin)


def test_tables_are_no_parameters() -> None:
    decoder = make()
    assert not {"cos", "sin"} & decoder.state_dict().keys()
    assert all(not parameter.requires_grad for parameter in decoder.parameters())


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_named_shapes_scale_as_published(name: str) -> None:
    """B07: original length 8192, bounds 1 and 4."""
    rotary = SHAPES[name].rotary
    assert (rotary.kind, rotary.theta, rotary.rotary_dim) == ("llama3", 500000.0, SHAPES[name].head_dim)
    assert (rotary.low_freq_factor, rotary.high_freq_factor, rotary.original_max_position) == (1.0, 4.0, 8192)


class _LargestDouble(TorchDispatchMode):
    """Notes how large float64 tensors get."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.numel = max(self.numel, result.numel())
        return result


def test_tables_take_little_more_memory_than_they_are_large() -> None:
    """The float64 angles of all positions at once would be several times the tables."""
    rotary = RotaryConfig("default", 500000.0, 8)
    num_positions = 5 * POSITIONS_AT_ONCE // 2
    with _LargestDouble() as seen:
        cos, sin = rotary_tables(rotary, num_positions, "cpu")
    assert seen.numel == POSITIONS_AT_ONCE * 4
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse_frequencies(rotary, num_positions)
    assert torch.equal(cos, angles.cos().float())
    assert torch.equal(sin, angles.sin().float())
