import math
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
]
KIND_IDS = ["default", "theta 5e5", "linear", "llama3"]


def exact_frequency(rotary: RotaryConfig, pair: int) -> float:
    """Radians per position, by the published formulas, written with wavelengths as the Llama 3.1 release has them."""
    frequency = math.exp(-math.log(rotary.theta) * 2 * pair / rotary.rotary_dim)
    if rotary.kind == "linear":
        return frequency / rotary.factor
    if rotary.kind == "default":
        return frequency
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
    frequencies = inverse_frequencies(rotary)
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
    num_positions = 16000
    cos, sin = rotary_tables(rotary, num_positions, "cpu")
    for table in (cos, sin):
        assert table.shape == (num_positions, rotary.rotary_dim // 2)
        assert table.dtype == torch.float32
        # The fastest pair always moves on; the slower ones may keep their bits.
        assert (table[1:] != table[:-1]).any(-1).all()
    for position in (0, 1, 257, 4097, 8191, 15962):
        for pair in range(rotary.rotary_dim // 2):
            angle = position * exact_frequency(rotary, pair)
            assert abs(cos[position, pair].item() - math.cos(angle)) < 1e-7
            assert abs(sin[position, pair].item() - math.sin(angle)) < 1e-7


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
