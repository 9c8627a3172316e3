"""Config keys of the families: the table against transformers' config classes, and what is refused."""

from typing import Any

import pytest
import torch

from ostinato.model import Decoder, ModelConfig, UnsupportedModelError
from ostinato.model.families import FAMILIES, GUARDS, Family

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def translate(family: str, **changes: Any) -> ModelConfig:
    config = SIZES | {"architectures": [FAMILIES[family].hf_class]} | changes
    return ModelConfig.from_hf({key: value for key, value in config.items() if value is not ...})


def refusal(family: str, **changes: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        translate(family, **changes)
    return str(caught.value)


def transformers_config(family: Family, **changes: Any) -> dict[str, Any]:
    """What transformers writes into config.json for a config of the family."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family.name, **changes).to_dict()
    return config | {"architectures": [family.hf_class]}


@EVERY_FAMILY
@pytest.mark.parametrize("absent", ["", "num_key_value_heads"])
def test_absent_keys_mean_what_transformers_class_assumes(family: Family, absent: str) -> None:
    """B01, B08, B09, B35: the least that a config may say, against all that transformers writes out for it."""
    # 64 heads: of the 32 and 8 key/value heads that some classes assume, either divides them.
    sizes = {key: value for key, value in SIZES.items() if key != absent} | {
        "num_attention_heads": 64,
        "hidden_size": 256,
    }
    # Written out, `layer_types` decides of the windows, `head_dim` and `original_max_position_embeddings` are numbers.
    written = ModelConfig.from_hf(transformers_config(family, **sizes) | {"eos_token_id": None, "bos_token_id": None})
    assert ModelConfig.from_hf(sizes | {"architectures": [family.hf_class]}) == written
    assert ModelConfig.from_hf(sizes | {"model_type": family.name}) == written


# Vocabulary, hidden size, MLP, layers, heads, KV heads and other keys of well-known models, and their published size.
PUBLISHED: dict[str, tuple[str, tuple[int, ...], dict[str, Any], int]] = {
    "Mistral-7B": ("mistral", (32000, 4096, 14336, 32, 32, 8), {}, 7_241_732_096),
    "Mistral-Nemo": ("mistral", (131072, 5120, 14336, 40, 32, 8), {"head_dim": 128}, 12_247_782_400),
    "Qwen2.5-0.5B": ("qwen2", (151936, 896, 4864, 24, 14, 2), {"tie_word_embeddings": True}, 494_032_768),
    "Qwen2.5-7B": ("qwen2", (152064, 3584, 18944, 28, 28, 4), {}, 7_615_616_512),
    "Qwen3-0.6B": ("qwen3", (151936, 1024, 3072, 28, 16, 8), {"tie_word_embeddings": True}, 596_049_920),
    "Phi-3-mini": ("phi3", (32064, 3072, 8192, 32, 32, 32), {}, 3_821_079_552),
    "Phi-4": ("phi3", (100352, 5120, 17920, 40, 40, 10), {}, 14_659_507_200),
    "Phi-4-mini": ("phi3", (200064, 3072, 8192, 32, 24, 8), {"tie_word_embeddings": True}, 3_836_021_760),
    "SmolLM3-3B": ("smollm3", (128256, 2048, 11008, 36, 16, 4), {}, 3_075_098_624),
    "Granite-3.1-2B": ("granite", (49155, 2048, 8192, 40, 32, 8), {"tie_word_embeddings": True}, 2_533_531_648),
    "OLMo-2-7B": ("olmo2", (100352, 4096, 11008, 32, 32, 32), {}, 7_298_617_344),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_well_known_models_have_their_published_size(name: str) -> None:
    family, sizes, keys, num_parameters = PUBLISHED[name]
    assert translate(family, **dict(zip(SIZES, sizes, strict=True)), **keys).num_parameters == num_parameters


@EVERY_FAMILY
def test_parameters_are_counted(family: Family) -> None:
    config = translate(family.name, **({"attention_bias": True} if "attention_bias" in family.keys else {}))
    decoder = Decoder(config, dtype=torch.float32, device="meta")
    assert config.num_parameters == sum(parameter.numel() for parameter in decoder.parameters())


@EVERY_FAMILY
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_a_null_is_derived_and_takes_no_default(family: Family, key: str) -> None:
    config = translate(family.name, **{key: None})
    found, derived = (config.num_kv_heads, 4) if key == "num_key_value_heads" else (config.head_dim, 16)
    assert found == derived


@pytest.mark.parametrize("value", [None, ...], ids=["null", "absent"])
def test_tied_embeddings_by_default(value: object) -> None:
    """B01: SmolLM3 ties unless it is told not to; all others the other way round."""
    tied = [name for name in FAMILIES if translate(name, tie_word_embeddings=value).tie_embeddings]
    assert tied == ["smollm3"]
    assert not translate("smollm3", tie_word_embeddings=False).tie_embeddings


# Biases.


def test_qwen2_has_biases_of_q_k_and_v_whatever_the_config_says() -> None:
    """B09"""
    for flag in (..., None, False, True):
        config = translate("qwen2", attention_bias=flag)
        assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, False, False)


@EVERY_FAMILY
def test_a_bias_flag_is_read_by_those_that_have_it(family: Family) -> None:
    """B09: for the others the tensors decide: a bias that is stored is unexpected."""
    config = translate(family.name, attention_bias=True, mlp_bias=True)
    assert config.attention_bias == ("attention_bias" in family.keys or family.qkv_bias)
    assert config.output_bias == ("attention_bias" in family.keys)
    assert config.mlp_bias == ("mlp_bias" in family.keys)


# Windows.


def windows(family: str, **changes: Any) -> list[int | None]:
    config = translate(family, **changes)
    return [config.window_of(layer) for layer in range(6)]


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_window_in_every_layer(family: str) -> None:
    """B35"""
    assert windows(family, sliding_window=5) == [5] * 6
    assert windows(family, sliding_window=None) == [None] * 6
    assert windows(family) == [4096 if family == "mistral" else None] * 6
    assert "use_sliding_window = False contradicts sliding_window = 5" in refusal(
        family, sliding_window=5, use_sliding_window=False
    )
    assert windows(family, sliding_window=None, use_sliding_window=False) == [None] * 6


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None] * 6),
        ({"sliding_window": 5}, [None] * 6),
        ({"sliding_window": 5, "use_sliding_window": False}, [None] * 6),
        ({"sliding_window": None, "use_sliding_window": True}, [None] * 6),
        ({"sliding_window": 5, "use_sliding_window": True}, [None] * 6),
        ({"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4 + [5] * 2),
        ({"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}, [5] * 6),
        ({"use_sliding_window": True, "max_window_layers": 5}, [None] * 5 + [4096]),
    ],
    ids=str,
)
def test_a_window_in_the_upper_layers_once_switched_on(
    family: str, changes: dict[str, Any], expected: list[int | None]
) -> None:
    """B35: the windowed layers are those from `max_window_layers` on, 28 if absent."""
    assert windows(family, **changes) == expected


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_layer_types_decide(family: str) -> None:
    """B35"""
    types = ["sliding_attention", "full_attention"] * 3
    on = {"sliding_window": 5, "use_sliding_window": True}
    assert windows(family, layer_types=types, max_window_layers=6, **on) == [5, None] * 3
    assert windows(family, layer_types=["full_attention"] * 6, max_window_layers=0, **on) == [None] * 6
    for off in ({"sliding_window": 5}, {"sliding_window": None, "use_sliding_window": True}):
        assert "names sliding_attention for layer 0, but there is no sliding window" in refusal(
            family, layer_types=types, **off
        )


@pytest.mark.parametrize("types", [[], ["full_attention"] * 5, ["full_attention"] * 5 + ["chunked_attention"], "full",
                                   [["full_attention"]] * 6, {"0": "full_attention"}], ids=str)  # fmt: skip
@EVERY_FAMILY
def test_what_are_no_layer_types(family: Family, types: object) -> None:
    assert f"layer_types = {types!r} is not supported" in refusal(family.name, layer_types=types)


@EVERY_FAMILY
def test_layer_types_may_say_what_the_family_does(family: Family) -> None:
    if "layer_types" in family.keys:
        return
    window = {"sliding_window": 5} if family.window else {}
    kind = "sliding_attention" if family.window else "full_attention"
    assert translate(family.name, layer_types=[kind] * 6, **window) == translate(family.name, **window)
    other = ["sliding_attention"] + ["full_attention"] * 5
    assert "layer_types names" in refusal(family.name, layer_types=other, **window)


# Layers without rotation.


@pytest.mark.parametrize(
    ("changes", "unrotated"),
    [
        ({}, (3,)),
        ({"no_rope_layer_interval": 2}, (1, 3, 5)),
        ({"no_rope_layer_interval": 7}, ()),
        ({"no_rope_layers": [0, 1, 1, 1, 1, 0]}, (0, 5)),
        ({"no_rope_layers": [1] * 8, "no_rope_layer_interval": 2}, ()),
    ],
    ids=str,
)
def test_layers_without_rotation(changes: dict[str, Any], unrotated: tuple[int, ...]) -> None:
    """A 1 is a rotated layer. The window, where it is switched on, is for the others."""
    assert translate("smollm3", **changes).unrotated_layers == unrotated
    expected = [5 if layer in unrotated else None for layer in range(6)]
    assert windows("smollm3", sliding_window=5, use_sliding_window=True, **changes) == expected


@pytest.mark.parametrize("value", [[], [1] * 5, [1, 1, 1, 1, 1, 2], "111111", [None] * 6, {"0": 1}], ids=str)
def test_what_are_no_unrotated_layers(value: object) -> None:
    assert f"no_rope_layers = {value!r} is not a list of a 0 or 1 for each of 6" in refusal(
        "smollm3", no_rope_layers=value
    )


# Multipliers.


def test_multipliers_of_granite() -> None:
    keys = {"embedding_multiplier": 12, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
            "logits_scaling": 8.0}  # fmt: skip
    config = translate("granite", **keys)
    assert (config.embedding_multiplier, config.attention_scale) == (12.0, 0.015625)
    assert (config.residual_multiplier, config.logits_divisor) == (0.22, 8.0)
    assert translate("granite").attention_scale == 1.0
    assert translate("llama").attention_scale is None


@pytest.mark.parametrize("value", [0, -1.0, "2", True, float("nan")], ids=repr)
@pytest.mark.parametrize(
    "key", ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"]
)
def test_senseless_multipliers(key: str, value: object) -> None:
    assert refusal("granite", **{key: value}) == f"config key {key} = {value!r} is not a positive finite number"


# Rotary.


def test_phi3_has_two_kinds_and_calls_one_of_them_as_it_did() -> None:
    """B06"""
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for kind in ("longrope", "su", "yarn"):
        rotary = translate("phi3", max_position_embeddings=8192, rope_scaling={"type": kind} | lists).rotary
        assert (rotary.kind, rotary.factor, rotary.original_max_position) == ("longrope", 2.0, 4096)
    assert "supported: default, longrope" in refusal("phi3", rope_scaling={"type": "linear", "factor": 2.0})


@pytest.mark.parametrize("place", ["top", "nested"])
def test_part_of_a_head_may_stay_unrotated(place: str) -> None:
    part = {"partial_rotary_factor": 0.75}
    changes = part if place == "top" else {"rope_parameters": part}
    assert translate("phi3", **changes).rotary.rotary_dim == 12
    assert "partial_rotary_factor = 0.75 is not supported" in refusal("llama", **changes)
    assert translate("phi3", partial_rotary_factor=0.5, rope_parameters=part).rotary.rotary_dim == 12
    assert "supported: up to 1.0" in refusal("phi3", partial_rotary_factor=1.5)
    assert "rotary dimension 5 is not an even number" in refusal("phi3", partial_rotary_factor=5 / 16)


def test_theta_that_is_not_given() -> None:
    """B08: 10000, but for SmolLM3, whose class says otherwise."""
    assert {translate(name).rotary.theta for name in FAMILIES if name != "smollm3"} == {10000.0}
    assert translate("smollm3").rotary.theta == 2e6
    assert translate("smollm3", rope_parameters={"rope_theta": 5e6}).rotary.theta == 5e6


# What a family does not read is refused, unless it changes nothing.

CHANGING = {
    "hidden_act": "gelu",
    "sliding_window": 5,
    "use_sliding_window": True,
    "no_rope_layers": [1] * 6,
    "partial_rotary_factor": 0.5,
    "num_local_experts": 8,
    "num_experts": 8,
    "quantization_config": {"quant_method": "awq"},
    "is_encoder_decoder": True,
    "use_qk_norm": True,
    "qk_norm": True,
}


@pytest.mark.parametrize("key", GUARDS)
@EVERY_FAMILY
def test_guarded_keys(family: Family, key: str) -> None:
    """B12, B35"""
    value = CHANGING.get(key, 0.5)
    if key in family.keys:
        return
    assert refusal(family.name, **{key: value}).startswith(f"config key {key} = {value!r} is not supported; supported:")
    for neutral in (*GUARDS[key].neutral, None):
        assert translate(family.name, **{"sliding_window": None, key: neutral}) is not None
