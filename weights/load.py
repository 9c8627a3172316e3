"""From a checkpoint on disk to a model on a device, one tensor at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.config import DTYPES
from ..model.decoder import Decoder
from .checkpoint import Checkpoint, CheckpointError
from .names import EMBEDDING, HEAD, Rows, match_names

# Rows of a tied head compared at a time: the cast of more would be another large copy.
COMPARE_ROWS = 4096

MAX_POSITIONS = 2**23
"""Twice the longest context that is published, about; tables of more are made only if a context is asked for."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        seconds: from the first header compared to the last tensor copied.
        nbytes: bytes of the parameters, in `dtype`.
        num_tensors: tensors read from the checkpoint.
        dtype, device: of every parameter.
    """

    seconds: float
    nbytes: int
    num_tensors: int
    dtype: torch.dtype
    device: torch.device


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    context: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Decoder, LoadReport]:
    """Build the model of a checkpoint and fill it.

    Every stored tensor is consumed once and every parameter row is written once, straight from the file to its place,
    cast on the way. Beside the parameters, no more of the checkpoint is in memory than one tensor or one mapped run.

    Args:
        checkpoint: what `open_checkpoint` returned.
        dtype: float32, float16 or bfloat16, of all parameters; by default `checkpoint.default_dtype`.
        device: where the parameters are made.
        context: tokens that the longest sequence will have; None: as many as the config admits.
        progress: called with (stored bytes read, stored bytes in all) after every tensor.

    Raises:
        NameMismatchError: stored names or shapes are not those of the config; nothing has been read by then.
        CheckpointError: the config ties the head to the embedding and a different head is stored; or it names more
            than MAX_POSITIONS positions and no `context` is given.
        ValueError: a dtype that no model runs in.
    """
    dtype = checkpoint.default_dtype if dtype is None else dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"weights cannot be loaded as {dtype}; supported: {', '.join(DTYPES)}")
    started = time.perf_counter()
    stored = checkpoint.tensor_info()
    places = match_names(checkpoint.config, stored, checkpoint.path)
    _check_positions(checkpoint, context)
    model = Decoder(checkpoint.config, dtype=dtype, device=device, context=context)
    parameters = dict(model.named_parameters())
    _check_cover(places, {name: tuple(parameter.shape) for name, parameter in parameters.items()})

    pending, written = set(stored), set[tuple[str, int]]()
    done, total = 0, sum(info.nbytes for info in stored.values())
    for name, tensor in checkpoint.tensors():
        assert name in pending, "a checkpoint yields each of its tensors once"
        pending.remove(name)
        if name in places:
            rows = places[name]
            target = parameters[rows.parameter].narrow(0, rows.start, rows.shape[0])
            assert tensor.shape == target.shape, "a checkpoint yields its tensors in the shapes it promised"
            if (rows.parameter, rows.start) not in written:
                target.copy_(tensor)
                written.add((rows.parameter, rows.start))
            elif not _equal(tensor, target):
                raise CheckpointError(
                    f"{checkpoint.path}: the config ties the head to the embedding, but {HEAD} differs from "
                    f"{EMBEDDING}; set tie_word_embeddings to false if the stored head is the right one"
                )
        done += stored[name].nbytes
        if progress is not None:
            progress(done, total)
    assert not pending, "a checkpoint yields all of its tensors"

    nbytes = sum(parameter.nbytes for parameter in parameters.values())
    seconds = time.perf_counter() - started
    return model, LoadReport(seconds, nbytes, len(stored), dtype, model.embed_weight.device)


def _check_positions(checkpoint: Checkpoint, context: int | None) -> None:
    """The rotary tables grow with what the config says of the context: a number, not bytes that are there."""
    if context is None and checkpoint.config.max_position > MAX_POSITIONS:
        raise CheckpointError(
            f"{checkpoint.path}: max_position_embeddings {checkpoint.config.max_position} is above {MAX_POSITIONS}; "
            "say how long sequences will be (max_model_len)"
        )


def _check_cover(places: dict[str, Rows], shapes: dict[str, tuple[int, ...]]) -> None:
    """The row ranges of the name table tile the parameters of the decoder."""
    filled = dict.fromkeys(shapes, 0)
    for rows in sorted(set(places.values()), key=lambda rows: (rows.parameter, rows.start)):
        assert rows.start == filled[rows.parameter], "row ranges follow each other without gap or overlap"
        assert rows.shape[1:] == shapes[rows.parameter][1:], "a range has whole rows"
        filled[rows.parameter] += rows.shape[0]
    assert all(filled[name] == shape[0] for name, shape in shapes.items()), "every parameter is filled to its end"


def _equal(tensor: Tensor, target: Tensor) -> bool:
    """Whether the tensor, cast to dtype and device of the target, equals it."""
    parts = zip(torch.split(tensor, COMPARE_ROWS), torch.split(target, COMPARE_ROWS), strict=True)
    return all(torch.equal(part.to(kept), kept) for part, kept in parts)
