"""Records of the host on their way to the device, by copies that nobody waits for."""

import torch
from torch import Tensor


class StagingRing:
    """Pinned host buffers in turn, each reused only after the copy out of it has run.

    Args:
        shape: of the largest batch of records.
        num_entries: buffers; a host that is as many batches ahead waits.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, num_entries: int) -> None:
        self._device = device
        self._next = 0
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._buffers = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(num_entries)]
            self._copied = [torch.cuda.Event() for _ in range(num_entries)]

    def put(self, records: Tensor) -> Tensor:
        """`records` on the device, copied in stream order."""
        if not self._buffers:
            return records.to(self._device)
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        self._copied[index].synchronize()
        staged = self._buffers[index][: records.shape[0]].copy_(records).to(self._device, non_blocking=True)
        # Named, since the current device need not be the one that copies.
        self._copied[index].record(torch.cuda.current_stream(self._device))
        return staged
