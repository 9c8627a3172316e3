"""The table of names against transformers, against the decoder, and against checkpoints that do not fit it."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.model import Decoder, ModelConfig
from ostinato.weights import NameMismatchError, TensorInfo
from ostinato.weights.names import EMBEDDING, HEAD, Rows, match_names, name_table

Make = Callable[..., Any]
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


def headers(config: ModelConfig) -> dict[str, TensorInfo]:
    return {name: TensorInfo(torch.float32, rows.shape, 4) for name, rows in name_table(config).items()}


@pytest.fixture
def config(tiny_config: Make) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config())


@pytest.mark.parametrize("attention_bias", [False, True], ids=["", "attention-bias"])
@pytest.mark.parametrize("mlp_bias", [False, True], ids=["", "mlp-bias"])
def test_names_and_shapes_are_those_of_transformers(tiny_config: Make, attention_bias: bool, mlp_bias: bool) -> None:
    """B09: with all seven biases of a layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hf = tiny_config(attention_bias=attention_bias, mlp_bias=mlp_bias)
    theirs = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(LlamaConfig(**hf)).state_dict().items()}
    assert {name: rows.shape for name, rows in name_table(ModelConfig.from_hf(hf)).items()} == theirs


@given(
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (9, 3)]),
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    head_dim=st.sampled_from([2, 6, 8]),
    flags=st.fixed_dictionaries(
        {
            **{
                key: st.booleans()
                for key in ("attention_bias", "output_bias", "mlp_bias", "tie_embeddings", "post_norms")
            },
            "qk_norm": st.sampled_from([None, "head", "projection"]),
            "architecture": st.sampled_from(["llama", "phi3"]),
        }
    ),
)
def test_table_tiles_the_decoder(
    heads: tuple[int, int], sizes: tuple[int, int, int, int], head_dim: int, flags: dict[str, Any]
) -> None:
    """Every row of every parameter of the decoder has exactly one source."""
    from ostinato.model import RotaryConfig

    vocab_size, hidden_size, intermediate_size, num_layers = sizes
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        norm_eps=1e-5,
        rotary=RotaryConfig("default", 1e4, head_dim),
        max_position=8,
        **flags,
    )
    sources = defaultdict(list)
    for rows in name_table(config).values():
        sources[rows.parameter] += range(rows.start, rows.start + rows.shape[0])
    parameters = dict(Decoder(config, dtype=torch.float32, device="cpu").named_parameters())
    assert {name: sorted(rows) for name, rows in sources.items()} == {
        name: list(range(parameter.shape[0])) for name, parameter in parameters.items()
    }
    assert all(rows.shape[1:] == parameters[rows.parameter].shape[1:] for rows in name_table(config).values())


FAMILY_FAULTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "qwen2 without biases": ("qwen2", "model.layers.1.self_attn.k_proj.bias", {"half_merged": "k_proj.bias"}),
    "qwen3 without norms": ("qwen3", "model.layers.0.self_attn.q_norm.weight", {"missing": "q_norm.weight"}),
    "phi3 unfused": ("phi3", "model.layers.0.self_attn.qkv_proj.weight", {"missing": "qkv_proj.weight"}),
    "olmo2 without norms behind": ("olmo2", "model.layers.1.post_feedforward_layernorm.weight",
                                   {"missing": "post_feedforward_layernorm.weight"}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "dropped", "expected"), FAMILY_FAULTS.values(), ids=FAMILY_FAULTS)
def test_what_a_family_stores_is_asked_for(
    family: str, dropped: str, expected: dict[str, str], tiny_config: Make
) -> None:
    """B09: biases that no flag announces, norms, fused projections."""
    config = ModelConfig.from_hf(tiny_config(architectures=None, model_type=family))
    stored = headers(config)
    del stored[dropped]
    with pytest.raises(NameMismatchError) as error:
        match_names(config, stored, "here")
    for kind in ("missing", "half_merged", "unexpected", "misshaped"):
        found = getattr(error.value, kind)
        assert [name for name in found if name.endswith(expected.get(kind, "-"))] == found
    assert len(error.value.missing + error.value.half_merged) == 1


def test_tensors_of_one_family_are_not_those_of_another(tiny_config: Make) -> None:
    """B09: every bias, norm or fused tensor that is left over is named."""
    llama = ModelConfig.from_hf(tiny_config())
    for family in ("qwen2", "qwen3", "phi3", "olmo2"):
        other = ModelConfig.from_hf(tiny_config(architectures=None, model_type=family))
        with pytest.raises(NameMismatchError) as error:
            match_names(llama, headers(other), "here")
        assert set(error.value.unexpected) == headers(other).keys() - headers(llama).keys() != set()


def test_order_within_fused_parameters(tiny_config: Make) -> None:
    table = name_table(ModelConfig.from_hf(tiny_config(attention_bias=True)))
    assert [table[name] for name in (Q, K, V)] == [
        Rows("layers.0.qkv_weight", 0, (18, 12)),
        Rows("layers.0.qkv_weight", 18, (6, 12)),
        Rows("layers.0.qkv_weight", 24, (6, 12)),
    ]
    assert table["model.layers.1.self_attn.v_proj.bias"] == Rows("layers.1.qkv_bias", 24, (6,))
    assert table["model.layers.1.mlp.gate_proj.weight"] == Rows("layers.1.gate_up_weight", 0, (20, 12))
    assert table["model.layers.1.mlp.up_proj.weight"] == Rows("layers.1.gate_up_weight", 20, (20, 12))


def test_what_fits(config: ModelConfig) -> None:
    assert match_names(config, headers(config), "here") == name_table(config)


@pytest.mark.parametrize(
    "name", ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"], ids=["model", "layer"]
)
def test_old_rotary_buffers_are_passed_over(config: ModelConfig, name: str) -> None:
    """B09: the only names that may be left over."""
    stored = headers(config) | {name: TensorInfo(torch.float32, (3,), 12)}
    assert name not in match_names(config, stored, "here")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.mlp.rotary_emb.inv_freq",
        "xmodel.rotary_emb.inv_freq",
        "layers.0.qkv_weight",
        "embed_weight",
    ],
)
def test_other_leftovers_are_errors(config: ModelConfig, name: str) -> None:
    """B09: a bias that the config does not announce is as unexpected as anything else."""
    with pytest.raises(NameMismatchError, match=f"^here: .*unexpected: {name}$") as error:
        match_names(config, headers(config) | {name: TensorInfo(torch.float32, (18,), 72)}, "here")
    assert error.value.unexpected == [name]


@pytest.mark.parametrize("absent", [(Q,), (V,), (Q, K)], ids=["q", "v", "qk"])
def test_half_merged(config: ModelConfig, absent: tuple[str, ...]) -> None:
    stored = {name: info for name, info in headers(config).items() if name not in absent}
    with pytest.raises(NameMismatchError, match=r"half-merged: .*layers\.0\.qkv_weight") as error:
        match_names(config, stored, "here")
    assert (error.value.half_merged, error.value.missing) == (list(absent), [])


def test_a_fused_parameter_of_which_nothing_is_stored_is_missing(config: ModelConfig) -> None:
    stored = {name: info for name, info in headers(config).items() if name not in (Q, K, V)}
    with pytest.raises(NameMismatchError, match=f"missing: {Q}, {K}, {V}$") as error:
        match_names(config, stored, "here")
    assert error.value.half_merged == []


def test_transposed_is_misshaped(config: ModelConfig) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(
        NameMismatchError, match=r"mis-shaped: .*down_proj.weight \(\[20, 12\] instead of \[12, 20\]\)$"
    ):
        match_names(config, headers(config) | {name: TensorInfo(torch.float32, (20, 12), 960)}, "here")


def test_untied_without_head(config: ModelConfig) -> None:
    """B01 (iii)"""
    stored = {name: info for name, info in headers(config).items() if name != HEAD}
    with pytest.raises(NameMismatchError, match=rf"missing: {HEAD} \(the config does not tie"):
        match_names(config, stored, "here")


def test_tied_with_neither_head_nor_embedding(tiny_config: Make) -> None:
    config = ModelConfig.from_hf(tiny_config(tie_word_embeddings=True))
    stored = headers(config)
    del stored[EMBEDDING]
    with pytest.raises(NameMismatchError) as error:
        match_names(config, stored, "here")
    assert (error.value.missing, error.value.unexpected) == ([EMBEDDING], [])


@given(data=st.data())
def test_every_fault_is_listed(tiny_config: Make, data: st.DataObject) -> None:
    """Names removed, renamed and mis-shaped in any mixture are all reported, each once and in its place."""
    config = ModelConfig.from_hf(tiny_config(attention_bias=True))
    stored = headers(config)
    fates = data.draw(st.dictionaries(st.sampled_from(sorted(stored)), st.sampled_from(["dropped", "renamed", "bent"])))
    for name, fate in fates.items():
        info = stored[name]
        if fate == "bent":
            stored[name] = TensorInfo(info.dtype, data.draw(st.sampled_from([(), (7,), (*info.shape, 1)])), 4)
        else:
            del stored[name]
            if fate == "renamed":
                stored[f"base.{name}"] = info
    if not fates:
        match_names(config, stored, "here")
        return
    with pytest.raises(NameMismatchError) as error:
        match_names(config, stored, "here")
    bent = sorted(name for name, fate in fates.items() if fate == "bent")
    gone = sorted(fates.keys() - set(bent))
    assert sorted(error.value.misshaped) == bent
    assert sorted(error.value.missing + error.value.half_merged) == gone
    assert sorted(error.value.unexpected) == sorted(f"base.{name}" for name in gone if fates[name] == "renamed")
    table = name_table(config)
    left = {table[name].parameter for name in table if name not in gone}
    assert all((table[name].parameter in left) == (name in error.value.half_merged) for name in gone)
    if len(fates) <= 12:
        assert all(name in str(error.value) for name in fates)
