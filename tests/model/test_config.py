import json
import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.model import SHAPES, Decoder, ModelConfig, RotaryConfig, UnsupportedModelError
from ostinato.model.config import MAX_LAYERS
from ostinato.model.families import FAMILIES, FAMILY_OF_CLASS, GUARDS, ROTARY_KINDS

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


def translate(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(MINIMAL | changes)


def refusal(**changes: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        translate(**changes)
    return str(caught.value)


def test_the_least_that_a_config_may_say() -> None:
    assert translate() == ModelConfig(
        architecture="llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        norm_eps=1e-6,
        rotary=RotaryConfig("default", 10000.0, 8),
        max_position=2048,
    )


def test_every_key_is_read() -> None:
    config = translate(
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-5,
        rope_theta=500000,
        max_position_embeddings=4096,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_id=[3, 5],
        bos_token_id=1,
    )
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        norm_eps=1e-5,
        rotary=RotaryConfig("default", 500000.0, 6),
        max_position=4096,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        dtype=torch.bfloat16,
        eos_token_ids=(3, 5),
        bos_token_id=1,
    )


OPTIONAL = [
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "bos_token_id",
    "hidden_act",
    "partial_rotary_factor",
    "sliding_window",
    "quantization_config",
    "model_type",
]


@pytest.mark.parametrize("key", OPTIONAL)
def test_null_is_absent(key: str) -> None:
    assert translate(**{key: None}) == translate()


@pytest.mark.parametrize("key", sorted(MINIMAL.keys() - {"architectures"}))
def test_a_size_that_has_no_default_is_asked_for(key: str) -> None:
    assert refusal(**{key: None}) == f"config key {key} is missing"


# The base of the frequencies and their scaling.


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_theta": 1000000},
    ],
    ids=str,
)
def test_theta_at_the_top_or_nested_and_nested_wins(spelling: dict[str, Any]) -> None:
    """B08"""
    assert translate(**spelling).rotary == RotaryConfig("default", 1e6, 8)


def test_theta_defaults_to_10000() -> None:
    """B08: neither spelling."""
    assert translate(rope_parameters={"rope_type": "default"}).rotary.theta == 10000.0


@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("names", [["type"], ["rope_type"], ["type", "rope_type"]], ids="+".join)
class TestScaling:
    """B06: both names of the kind, alone and together, in both blocks."""

    def test_linear(self, block: str, names: list[str]) -> None:
        scaling = dict.fromkeys(names, "linear") | {"factor": 4}
        assert translate(rope_theta=1e5, **{block: scaling}).rotary == RotaryConfig("linear", 1e5, 8, 4.0)

    def test_llama3(self, block: str, names: list[str]) -> None:
        scaling = dict.fromkeys(names, "llama3") | LLAMA3
        assert translate(**{block: scaling}).rotary == RotaryConfig("llama3", 1e4, 8, 8.0, 1.0, 4.0, 512)

    def test_default(self, block: str, names: list[str]) -> None:
        assert translate(**{block: dict.fromkeys(names, "default")}).rotary == translate().rotary
        assert translate(**{block: dict.fromkeys(names)}).rotary == translate().rotary

    def test_dynamic(self, block: str, names: list[str]) -> None:
        scaling = dict.fromkeys(names, "dynamic") | {"factor": 4}
        assert translate(**{block: scaling}).rotary == RotaryConfig("dynamic", 1e4, 8, 4.0)

    def test_yarn(self, block: str, names: list[str]) -> None:
        """Factor 4: cos and sin are multiplied by 0.1 ln 4 + 1."""
        scaling = dict.fromkeys(names, "yarn") | {"factor": 4, "original_max_position_embeddings": 512}
        expected = RotaryConfig("yarn", 1e4, 8, 4.0, original_max_position=512, attention_factor=0.1 * math.log(4) + 1)
        assert translate(**{block: scaling}).rotary == expected
        assert round(expected.attention_factor, 6) == 1.138629

    def test_longrope(self, block: str, names: list[str]) -> None:
        lists = {"short_factor": [1, 1.5, 2, 3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
        scaling = dict.fromkeys(names, "longrope") | lists | {"original_max_position_embeddings": 512}
        rotary = translate(**{block: scaling}).rotary
        assert (rotary.short_factors, rotary.long_factors) == ((1.0, 1.5, 2.0, 3.0), (1.0, 2.0, 4.0, 8.0))
        assert (rotary.factor, rotary.original_max_position) == (4.0, 512)
        assert rotary.attention_factor == math.sqrt(1 + math.log(4) / math.log(512))

    @pytest.mark.parametrize("kind", ["su", "mrope", "invented", "", 3, ["linear"]])
    def test_other_kinds_are_refused_by_name(self, block: str, names: list[str], kind: object) -> None:
        message = refusal(**{block: dict.fromkeys(names, kind) | {"factor": 4.0}})
        supported = "default, linear, dynamic, llama3, yarn, longrope"
        assert message == f"rope_type {kind!r} is not supported; supported: {supported}"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        ({"mscale": 0.5, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
    ],
    ids=str,
)
def test_the_attention_factor_of_yarn(numbers: dict[str, float], expected: float) -> None:
    """B06: an explicit factor replaces the rule; `mscale` and `mscale_all_dim` count only together."""
    assert translate(rope_scaling=YARN | numbers).rotary.attention_factor == pytest.approx(expected, rel=1e-15)


def test_yarn_and_longrope_may_leave_the_factor_to_the_lengths() -> None:
    assert translate(rope_scaling=YARN | {"factor": None}).rotary.factor == 2048 / 512
    original = {"original_max_position_embeddings": 1024}
    assert translate(rope_scaling=LONGROPE | original).rotary.factor == 2.0
    assert translate(rope_scaling=LONGROPE | original | {"factor": 3.0}).rotary.factor == 3.0
    assert translate(rope_scaling=LONGROPE).rotary.attention_factor == 1.0


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (YARN | {"beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast 1.0 is below beta_slow 2.0"),
        (YARN | {"truncate": 1}, "truncate = 1 is neither true nor false"),
        (YARN | {"rope_theta": 1.0}, "rope_theta 1.0 must be above 1 for yarn"),
        (LONGROPE | {"long_factor": None}, "long_factor is missing"),
        (LONGROPE | {"short_factor": [1.0] * 3}, "short_factor = [1.0, 1.0, 1.0] is not a list of 4 numbers"),
        (LONGROPE | {"short_factor": [1.0, 0, 1.0, 1.0]}, "short_factor[1] = 0 is not a positive finite number"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "must be above 1 for longrope"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_that_make_no_sense_for_the_kind(scaling: dict[str, Any], message: str) -> None:
    assert message in refusal(rope_scaling=scaling)


def test_both_blocks_may_say_the_same_and_must_not_disagree() -> None:
    """transformers takes one whole and drops the other, so that there is no reading of two that is right."""
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2}}
    assert translate(**both).rotary == RotaryConfig("linear", 1e4, 8, 2.0)
    both["rope_parameters"] = {"rope_type": "default"}
    assert refusal(**both) == "rope_type is given twice: 'linear' and 'default'"
    assert "given twice" in refusal(rope_scaling={"type": "linear", "rope_type": "llama3"} | LLAMA3)
    both["rope_parameters"] = {"rope_theta": 3000.0}
    assert refusal(**both) == "rope_type is given twice: 'linear' and 'default'"


def test_a_factor_needs_a_kind() -> None:
    """B06: a block that is read and then passed over. Some read it as linear, some as none."""
    assert (
        refusal(rope_scaling={"factor": 2.0}) == "config key rope_scaling has factor, but no rope_type to say of what"
    )
    assert translate(rope_scaling={"factor": None, "rope_theta": 3000.0}).rotary == RotaryConfig("default", 3000.0, 8)


def test_a_block_by_layer_type_is_refused() -> None:
    """B08"""
    layered = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert "full_attention, sliding_attention" in refusal(rope_parameters=layered)


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_scaling_without_its_numbers_is_refused(missing: str) -> None:
    scaling = {"rope_type": "llama3"} | LLAMA3
    del scaling[missing]
    assert refusal(rope_scaling=scaling) == f"config key {missing} is missing"
    assert "factor is missing" in refusal(rope_scaling={"rope_type": "linear"})


@pytest.mark.parametrize(
    ("top", "nested", "expected"), [(None, None, 4096), (None, 512, 512), (1024, 512, 1024), (1024, None, 1024)]
)
def test_the_original_length_of_llama3(top: int | None, nested: int | None, expected: int) -> None:
    """At the top, nested, or the whole context: the order in which transformers looks."""
    scaling = {"rope_type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": nested}
    config = translate(max_position_embeddings=4096, original_max_position_embeddings=top, rope_scaling=scaling)
    assert config.rotary.original_max_position == expected


@pytest.mark.parametrize("value", [0, -1.0, True, "8", math.nan, math.inf, 10**400, [8.0]], ids=repr)
@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "rope_theta"])
def test_senseless_scaling_numbers(key: str, value: object) -> None:
    message = refusal(rope_parameters={"rope_type": "llama3"} | LLAMA3 | {key: value})
    assert message == f"config key {key} = {value!r} is not a positive finite number"


def test_blend_bounds_in_the_wrong_order() -> None:
    scaling = {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}
    assert refusal(rope_scaling=scaling) == "low_freq_factor 4.0 is not below high_freq_factor 4.0"


@pytest.mark.parametrize("place", ["top", "rope_parameters", "rope_scaling"])
def test_partial_rotation_is_refused(place: str) -> None:
    part = {"partial_rotary_factor": 0.5}
    message = refusal(**(part if place == "top" else {place: part}))
    assert message == "config key partial_rotary_factor = 0.5 is not supported; supported: 1.0 or null"


# The dtype and the special tokens.


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({}, None),
        ({"dtype": None, "torch_dtype": None}, None),
        ({"dtype": "auto"}, None),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "torch.float32"}, torch.float32),
        ({"dtype": "float32", "torch_dtype": "float16"}, torch.float32),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
    ],
    ids=str,
)
def test_dtype_beats_torch_dtype(spelling: dict[str, Any], expected: torch.dtype | None) -> None:
    """B13"""
    assert translate(**spelling).dtype == expected


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["int8", "float8_e4m3fn", "float64", "", 16, {}], ids=repr)
def test_other_dtypes_are_refused(key: str, value: object) -> None:
    assert refusal(**{key: value}).endswith("supported: float32, float16, bfloat16")


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (0, (0,)), (7, (7,)), ([], ()), ([7], (7,)), ([9, 7, 8], (9, 7, 8))], ids=repr
)
def test_end_tokens_in_every_json_shape(value: object, expected: tuple[int, ...]) -> None:
    """B11"""
    assert translate(eos_token_id=value).eos_token_ids == expected


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "2", [[2]], [None], [2, -1], {"id": 2}, 2**31, 10**400], ids=repr)
def test_what_is_no_token_id(key: str, value: object) -> None:
    assert refusal(**{key: value}) == f"config key {key} = {value!r} is not a token id or a list of them"


# What is not built here.


@pytest.mark.parametrize(
    "architectures",
    [["GemmaForCausalLM"], ["LlamaModel"], ["LlamaForSequenceClassification"], ["NewForCausalLM", "OldModel"]],
    ids="+".join,
)
def test_other_architectures_are_refused_by_name(architectures: list[str]) -> None:
    assert refusal(architectures=architectures) == (
        f"architecture {', '.join(architectures)} is not supported; supported: LlamaForCausalLM, MistralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, Phi3ForCausalLM, SmolLM3ForCausalLM, GraniteForCausalLM, Olmo2ForCausalLM"
    )


@pytest.mark.parametrize("value", ["LlamaForCausalLM", [1], [None], {"0": "LlamaForCausalLM"}, 5, True], ids=repr)
def test_architectures_are_a_list_of_names(value: object) -> None:
    assert refusal(architectures=value) == f"architectures must be a list of names, not {value!r}"


def test_the_model_type_stands_in_for_absent_architectures() -> None:
    assert translate(architectures=None, model_type="llama") == translate()
    assert translate(architectures=[], model_type="llama") == translate()
    assert "model_type 'gpt2' is not supported" in refusal(architectures=None, model_type="gpt2")
    assert "model_type None is not supported" in refusal(architectures=None)


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        ("hidden_act", "gelu", "'silu' or 'swish' or null"),
        ("sliding_window", 4096, "null"),
        ("use_sliding_window", True, "False or null"),
        ("no_rope_layers", [1, 0], "null"),
        ("use_qk_norm", True, "False or null"),
        ("logits_scaling", 8.0, "1.0 or null"),
        ("residual_multiplier", 0.22, "1.0 or null"),
        ("attention_multiplier", 0.0156, "null"),
        ("final_logit_softcapping", 30.0, "null"),
        ("num_experts", 64, "0 or 1 or null"),
        ("quantization_config", {"quant_method": "gptq"}, "null"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_computation_is_refused(key: str, value: object, supported: str) -> None:
    """B35 among others: a sliding window is refused, not ignored, where the family has none."""
    assert refusal(**{key: value}) == f"config key {key} = {value!r} is not supported; supported: {supported}"


def test_notes_are_passed_over() -> None:
    notes = {"_name_or_path": "x", "transformers_version": "5.0", "use_cache": True, "attention_dropout": 0.1}
    assert translate(**notes, pretraining_tp=1, initializer_range=0.02, hidden_act="swish") == translate()


# Sizes.

SIZES = [*sorted(MINIMAL.keys() - {"architectures"}), "num_key_value_heads", "head_dim", "max_position_embeddings"]


@pytest.mark.parametrize("value", [0, -1, 1.5, 8.0, True, "8", [8], 2**31, 10**400, math.nan], ids=repr)
@pytest.mark.parametrize("key", SIZES)
def test_senseless_sizes(key: str, value: object) -> None:
    limit = MAX_LAYERS if key == "num_hidden_layers" else 2147483647
    assert refusal(**{key: value}) == f"config key {key} = {value!r} is not a whole number from 1 to {limit}"


def test_more_layers_than_can_be_listed() -> None:
    """The name table has an entry for each: a billion of them would fill the memory before anything is compared."""
    assert translate(num_hidden_layers=MAX_LAYERS).num_layers == MAX_LAYERS
    assert f"from 1 to {MAX_LAYERS}" in refusal(num_hidden_layers=MAX_LAYERS + 1)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [0, 1, "true", []], ids=repr)
def test_what_is_no_flag(key: str, value: object) -> None:
    assert refusal(**{key: value}) == f"config key {key} = {value!r} is neither true nor false"


@pytest.mark.parametrize("value", [0, -1e-5, True, "1e-5", math.nan, math.inf], ids=repr)
def test_senseless_eps(value: object) -> None:
    assert refusal(rms_norm_eps=value) == f"config key rms_norm_eps = {value!r} is not a positive finite number"


def test_head_dim_is_its_own_number() -> None:
    assert translate(head_dim=80).head_dim == 80
    assert translate(head_dim=80).rotary.rotary_dim == 80
    assert translate(hidden_size=33, head_dim=8).hidden_size == 33
    assert "multiple of num_attention_heads 4" in refusal(hidden_size=33)
    assert "rotary dimension 7 is not an even number from 2 to head_dim 7" in refusal(head_dim=7)


def test_query_heads_share_kv_heads_evenly() -> None:
    for bad in (3, 8):
        assert f"4 is not a multiple of num_key_value_heads {bad}" in refusal(num_key_value_heads=bad)


# Any JSON value at any known key: an answer or UnsupportedModelError, and nothing else.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NESTED = [*LLAMA3, *YARN, *LONGROPE, "type", "rope_theta", "partial_rotary_factor", "attention_factor", "mscale",
          "mscale_all_dim", "beta_fast", "beta_slow", "truncate"]  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(FAMILY_OF_CLASS)),
    st.sampled_from(sorted({*MINIMAL, *OPTIONAL, *SIZES}.union(GUARDS, *(f.keys for f in FAMILIES.values())))),
    JSON,
    st.booleans(),
)
def test_junk_at_a_key_is_ignored_or_refused(hf_class: str, key: str, junk: Any, switch: bool) -> None:
    with suppress(UnsupportedModelError):
        translate(**{"architectures": [hf_class], "use_sliding_window": switch, key: junk})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(["rope_scaling", "rope_parameters"]), st.sampled_from(ROTARY_KINDS), st.sampled_from(NESTED), JSON
)
def test_junk_inside_the_rotary_block_is_ignored_or_refused(block: str, kind: str, key: str, junk: Any) -> None:
    with suppress(UnsupportedModelError):
        translate(**{block: LLAMA3 | LONGROPE | {"rope_type": kind} | {key: junk}})


def test_translation_leaves_its_input_alone() -> None:
    config = MINIMAL | {"rope_scaling": {"type": "llama3"} | LLAMA3, "eos_token_id": [1, 2]}
    before = json.dumps(config)
    ModelConfig.from_hf(config)
    assert json.dumps(config) == before


# Derived numbers.


@pytest.mark.parametrize("flag", ["", "attention_bias", "mlp_bias", "tie_word_embeddings"])
def test_num_parameters_counts_those_of_the_decoder(flag: str) -> None:
    config = translate(num_key_value_heads=2, head_dim=10, **({flag: True} if flag else {}))
    decoder = Decoder(config, dtype=torch.float32, device="meta")
    assert config.num_parameters == sum(parameter.numel() for parameter in decoder.parameters())


def test_kv_bytes_per_token() -> None:
    config = translate(num_key_value_heads=2, head_dim=10)
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 10 * 2
    assert config.kv_bytes_per_token(torch.float32) == 2 * 2 * 2 * 10 * 4


# As the model cards count them.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_named_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert SHAPES[name].num_parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 4096, "use_sliding_window": False}, {"layer_types": ["full_attention", "full_attention"]}],
    ids=["window switched off", "every layer full"],
)
def test_spellings_of_full_attention_are_neutral(change: dict[str, Any]) -> None:
    """B35: the config turns the window off, and every token sees all keys."""
    assert translate(**change) == translate()
