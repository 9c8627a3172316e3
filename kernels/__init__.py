"""The ops of a decode step, one a file.

Each op has a launcher `op` and a torch reference `op_ref` of the same signature, right on any device and dtype, and the
truth that device kernels are tested against. Where an op has no device kernel, the launcher is the reference.
"""

from .attention_decode import attention_decode, attention_decode_ref
from .attention_prefill import attention_prefill, attention_prefill_ref
from .commit import commit, commit_ref
from .embedding import embedding, embedding_ref
from .kv_cache import FIRST_BLOCK, SINK_BLOCK, kv_cache_shape
from .linear import linear, linear_ref
from .rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from .rotary_kv_write import rotary_kv_write, rotary_kv_write_ref
from .slot_mapping import slot_mapping, slot_mapping_ref
from .update_rows import update_rows, update_rows_ref

__all__ = [
    "FIRST_BLOCK",
    "SINK_BLOCK",
    "add_rms_norm",
    "add_rms_norm_ref",
    "attention_decode",
    "attention_decode_ref",
    "attention_prefill",
    "attention_prefill_ref",
    "commit",
    "commit_ref",
    "embedding",
    "embedding_ref",
    "kv_cache_shape",
    "linear",
    "linear_ref",
    "rms_norm",
    "rms_norm_ref",
    "rotary_kv_write",
    "rotary_kv_write_ref",
    "slot_mapping",
    "slot_mapping_ref",
    "update_rows",
    "update_rows_ref",
]
