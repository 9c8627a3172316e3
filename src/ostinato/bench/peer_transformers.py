"""Hugging Face transformers: eager over its dynamic cache, or compiled over its static one."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..model import Decoder, ModelConfig
from ..model.rotary import NUMBERS
from ..weights.names import name_table
from .peer_work import Work, timed

ROTARY_NAMES = {"original_max_position": "original_max_position_embeddings"}


def hf_config(config: ModelConfig) -> Any:
    """The config that transformers has for the same model.

    Raises:
        ImportError: transformers is not installed.
        ValueError: a family that is not among those compared.
    """
    from transformers import AutoConfig

    if config.architecture not in ("llama", "qwen3"):
        raise ValueError(f"the comparison knows Llama and Qwen3, not {config.architecture}")
    rotary = asdict(config.rotary)
    numbers = {ROTARY_NAMES.get(name, name): rotary[name] for name in NUMBERS[config.rotary.kind]}
    return AutoConfig.for_model(
        config.architecture,
        architectures=["LlamaForCausalLM" if config.architecture == "llama" else "Qwen3ForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_position,
        rope_parameters={"rope_type": config.rotary.kind, "rope_theta": config.rotary.theta, **numbers},
        attention_bias=config.attention_bias,
        tie_word_embeddings=config.tie_embeddings,
    )


def stored_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Views of the decoder's parameters, by the names of a checkpoint."""
    parameters = dict(decoder.named_parameters())
    return {
        name: parameters[rows.parameter][rows.start : rows.start + rows.shape[0]]
        for name, rows in name_table(decoder.config).items()
    }


class TransformersModel:
    """transformers' own class over the decoder's weights, which are not copied."""

    def __init__(self, decoder: Decoder, *, compiled: bool) -> None:
        import transformers

        self.version = transformers.__version__
        self.compiled = compiled
        config = hf_config(decoder.config)
        config._attn_implementation = "sdpa"
        auto: Any = transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(config)
        model.load_state_dict(stored_tensors(decoder), strict=False, assign=True)
        if decoder.config.tie_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        # Computed and not stored, so it is still on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(decoder.device)
        self.model = model.eval()

    def at(self, work: Work) -> "TransformersPeer":
        return TransformersPeer(self, work)


class TransformersPeer:
    """The loop of `generate`, greedy, without what it does beside the model; tokens stay on the device."""

    def __init__(self, model: TransformersModel, work: Work) -> None:
        from transformers import DynamicCache, StaticCache

        self._model, self._subject, self._compiled = model.model, work.subject, model.compiled
        config = self._model.config
        self._cache: DynamicCache | StaticCache
        if model.compiled:
            torch._dynamo.reset()  # shapes of other cells are no reason to compile for any shape
            self._cache = StaticCache(config=config, max_cache_len=work.context + work.room)
        else:
            self._cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            self._cache.update(*work.keys_values(layer), layer)
        self._token_ids = work.token_ids()
        self._forward = self._decode
        if model.compiled:
            self._forward = torch.compile(self._decode, mode="reduce-overhead", fullgraph=True)
        self._first: list[int] | None = None

    @torch.no_grad()
    def run(self, count: int) -> float:
        if self._first is None:
            self._step()
            self._first = self._token_ids.flatten().tolist()
            count -= 1
        return timed(self._step, count, self._subject.wait)

    def first_tokens(self) -> list[int] | None:
        return self._first

    def _step(self) -> None:
        if self._compiled:
            torch.compiler.cudagraph_mark_step_begin()
        token_ids = self._forward(self._token_ids)
        self._token_ids = token_ids.clone() if self._compiled else token_ids  # a graph's output is overwritten

    def _decode(self, token_ids: Tensor) -> Tensor:
        output = self._model(input_ids=token_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return torch.argmax(output.logits[:, -1], -1, keepdim=True)
