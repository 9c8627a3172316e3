"""Where everything lies that graphs are captured with, compared when they first replay for somebody."""

from .decode_pieces import DecodePieces
from .graph_buckets import BucketKey
from .graph_reason import Path
from .static_buffers import StaticBuffers


class Addresses:
    """Those of weights, caches, step state and buffers when this is made, which is before any capture."""

    def __init__(self, pieces: DecodePieces, buffers: StaticBuffers) -> None:
        self._pieces = pieces
        self._buffers = buffers
        self._before = self._now()
        self._checked: set[tuple[Path, BucketKey]] = set()

    def check(self, path: Path, key: BucketKey) -> None:
        """At the first call for a bucket: whether all lies where it lay.

        Raises:
            RuntimeError: something has moved; names it.
        """
        if (path, key) in self._checked:
            return
        now = self._now()
        moved = [name for name, address in self._before.items() if now.get(name) != address]
        if moved:
            raise RuntimeError(f"moved since the graphs were captured: {', '.join(moved[:5])}")
        self._checked.add((path, key))

    def forget(self) -> None:
        """Look again at every bucket's next replay."""
        self._checked.clear()

    def _now(self) -> dict[str, int]:
        pieces = self._pieces
        named = dict(pieces.model.state_dict()) | self._buffers.tensors
        caches = [*pieces.kv_cache.k, *pieces.kv_cache.v]
        rows = [*pieces.state.device_tensors(), *pieces.sampler.device_tensors(), pieces.model.cos, pieces.model.sin]
        named |= {f"cache {i}": tensor for i, tensor in enumerate(caches)}
        named |= {f"row state {i}": tensor for i, tensor in enumerate(rows)}
        return {name: tensor.data_ptr() for name, tensor in named.items()}
