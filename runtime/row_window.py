"""Rows of the batch brought to the front, where graphs read."""

import contextlib
from collections.abc import Iterator

from .sampler import Sampler
from .step_state import StepState


@contextlib.contextmanager
def rows_in_front(state: StepState, sampler: Sampler, start: int, stop: int, bucket: int) -> Iterator[None]:
    """Within the body, rows `start .. stop - 1` are the rows `0 ..`, and the rest of the bucket is dead.

    A graph reads the leading rows of the step state. The later part of a batch that is split takes their place for one
    replay; then all rows are back where they were, as the replay left them. All in stream order, on the device.
    """
    if start == 0:
        yield
        return
    count = stop - start
    assert count <= bucket <= start, "a part is not larger than the parts before it"
    tensors = [*state.row_tensors(), *sampler.row_tensors()]
    front = [tensor[:bucket].clone() for tensor in tensors]
    for tensor in tensors:
        tensor[:count].copy_(tensor[start:stop])
    state.kill_rows(count, bucket)
    try:
        yield
    finally:
        for tensor, before in zip(tensors, front, strict=True):
            tensor[start:stop].copy_(tensor[:count])
            tensor[:bucket].copy_(before)
