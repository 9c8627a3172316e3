"""From a name to a model: find it, open it, load it."""

from .checkpoint import Checkpoint, CheckpointError, TensorInfo, open_checkpoint
from .dummy import dummy_model
from .load import LoadReport, load_model
from .names import NameMismatchError
from .resolve import DEMO_HUB_ID, ResolveError, demo_model_path, resolve
from .tokenizer import Tokenizer

__all__ = [
    "DEMO_HUB_ID",
    "Checkpoint",
    "CheckpointError",
    "LoadReport",
    "NameMismatchError",
    "ResolveError",
    "TensorInfo",
    "Tokenizer",
    "demo_model_path",
    "dummy_model",
    "load_model",
    "open_checkpoint",
    "resolve",
]
