"""The ops of a step, one a file.

Each op has a launcher `op` and a torch reference `op_ref` of the same signature, right on any device and dtype, and the
truth that device kernels are tested against. Where an op has no device kernel, the launcher is the reference.
"""

from .argmax import greedy, greedy_ref
from .attention_decode import (
    attention_decode,
    attention_decode_ref,
    rotary_attention_decode,
    rotary_attention_decode_ref,
)
from .attention_prefill import attention_prefill, attention_prefill_ref
from .commit import commit, commit_ref
from .embedding import embedding, embedding_ref
from .kv_cache import FIRST_BLOCK, SINK_BLOCK, kv_cache_shape
from .linear import linear, linear_ref
from .logit_bias import UNUSED_BIAS, ban_tokens, ban_tokens_ref, logit_bias, logit_bias_ref
from .logprobs import LogprobsWorkspace, logprobs, logprobs_ref
from .penalties import count_tokens, count_tokens_ref, penalties, penalties_ref
from .residual_add import residual_add, residual_add_ref
from .rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from .rotary_kv_write import rotary_kv_write, rotary_kv_write_ref
from .rotary_rows import rotary_rows, rotary_rows_ref
from .sample import sample, sample_ref
from .sample_rows import SampleSteps, SampleWorkspace, SamplingRows, sample_rows, sample_rows_ref
from .slot_mapping import slot_mapping, slot_mapping_ref
from .swiglu import swiglu, swiglu_ref
from .token_bitmask import num_bitmask_words, pack_token_bitmask, token_bitmask, token_bitmask_ref
from .update_rows import update_rows, update_rows_ref

__all__ = [
    "FIRST_BLOCK",
    "SINK_BLOCK",
    "UNUSED_BIAS",
    "LogprobsWorkspace",
    "SampleSteps",
    "SampleWorkspace",
    "SamplingRows",
    "add_rms_norm",
    "add_rms_norm_ref",
    "attention_decode",
    "attention_decode_ref",
    "attention_prefill",
    "attention_prefill_ref",
    "ban_tokens",
    "ban_tokens_ref",
    "commit",
    "commit_ref",
    "count_tokens",
    "count_tokens_ref",
    "embedding",
    "embedding_ref",
    "greedy",
    "greedy_ref",
    "kv_cache_shape",
    "linear",
    "linear_ref",
    "logit_bias",
    "logit_bias_ref",
    "logprobs",
    "logprobs_ref",
    "num_bitmask_words",
    "pack_token_bitmask",
    "penalties",
    "penalties_ref",
    "residual_add",
    "residual_add_ref",
    "rms_norm",
    "rms_norm_ref",
    "rotary_attention_decode",
    "rotary_attention_decode_ref",
    "rotary_kv_write",
    "rotary_kv_write_ref",
    "rotary_rows",
    "rotary_rows_ref",
    "sample",
    "sample_ref",
    "sample_rows",
    "sample_rows_ref",
    "slot_mapping",
    "slot_mapping_ref",
    "swiglu",
    "swiglu_ref",
    "token_bitmask",
    "token_bitmask_ref",
    "update_rows",
    "update_rows_ref",
]
