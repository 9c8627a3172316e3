"""Which graphs are captured, their keys, and which one serves a batch. No tensors here."""

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from .dummy_rows import RowInfo
    from .graph_backend import Graph

FINE_SIZES = 256
"""Up to here the default sizes lie 8 apart; above, 16 to each doubling: a batch is padded by a sixteenth at most."""


LIST_KEY = "capture_sizes"
"""Of the object in a list file; the rest of it says where the list comes from."""


@runtime_checkable
class CoveringKeyInfo(Protocol):
    """Key info whose graph serves other key info too, with the same results."""

    def covers(self, other: Any) -> bool: ...


class BucketKey(NamedTuple):
    """What a graph was captured for. `bs` counts requests; `num_tokens` is what the plan of the bucket carries."""

    graph_walk: str
    cg_key_info: Hashable
    bs: int
    num_tokens: int


@dataclass(frozen=True)
class CudaGraphConfig:
    """A family of buckets.

    Attributes:
        graph_walk: the kind of step: "decode", "verify", "prefill chunk" …
        capture_batch_sizes: requests of each bucket.
        cg_key_info: whatever else a graph is specific to.
        tokens_per_row: of a *batched* family: the tokens of a bucket follow from its batch size. None: *packed*.
        token_buckets: of a *packed* family: total tokens, each with each batch size.
        token_multiplier: tokens that the plan carries for each input token.
        caps_batch_size: False: only an acceleration of some sizes; larger batches run eagerly instead of being split.
    """

    graph_walk: str
    capture_batch_sizes: tuple[int, ...]
    cg_key_info: Hashable = None
    tokens_per_row: int | None = 1
    token_buckets: tuple[int, ...] = ()
    token_multiplier: int = 1
    caps_batch_size: bool = True

    def __post_init__(self) -> None:
        if (self.tokens_per_row is None) != bool(self.token_buckets):
            raise ValueError(
                "a config is batched (tokens_per_row) or packed (token_buckets), "
                f"got {self.tokens_per_row!r} and {self.token_buckets!r}"
            )

    @property
    def is_batched(self) -> bool:
        return self.tokens_per_row is not None

    def key(self, bs: int, num_tokens: int | None = None) -> BucketKey:
        """The key of a bucket; captures and look-ups both get theirs here. `num_tokens` (input tokens) if packed."""
        if self.tokens_per_row is not None:
            num_tokens = bs * self.tokens_per_row
        assert num_tokens is not None, "the tokens of a packed bucket do not follow from its batch size"
        return BucketKey(self.graph_walk, self.cg_key_info, bs, num_tokens * self.token_multiplier)

    def bucket_keys(self) -> list[BucketKey]:
        """Every bucket, largest first."""
        sizes = sorted(set(self.capture_batch_sizes), reverse=True)
        tokens: Sequence[int | None] = sorted(set(self.token_buckets), reverse=True) or [None]
        return [self.key(bs, num_tokens) for bs in sizes for num_tokens in tokens]

    def serves(self, graph_walk: str, cg_key_info: Hashable) -> bool:
        own = self.cg_key_info
        return self.graph_walk == graph_walk and (
            own == cg_key_info or (isinstance(own, CoveringKeyInfo) and own.covers(cg_key_info))
        )


class SlotLease(NamedTuple):
    """The right to replay one graph for one step."""

    key: BucketKey
    slot: int


class CaptureSpec(NamedTuple):
    """One graph that is to be captured."""

    key: BucketKey
    slot: int
    config_idx: int


@dataclass(frozen=True)
class CudaGraphSlot:
    """A captured graph and the buffers that its replay reads and writes.

    A bucket holds two of them where something is planned ahead: plan N + 1 writes the idle slot's buffers while
    replay N reads its own.
    """

    graph: "Graph"
    static_inputs: dict[str, "Tensor"]
    static_input_keys: tuple[str, ...]
    static_outputs: dict[str, "Tensor"]
    dummy_rids: list[int]
    dummy_metadata: "dict[int, RowInfo]"
    config_idx: int


@dataclass
class CudaGraphBucket:
    """The captured slots of one key."""

    config: CudaGraphConfig
    config_idx: int
    slots: list[CudaGraphSlot] = field(default_factory=list)


def capture_sizes(sizes: Iterable[int] | str | Path | None, max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: sorted, unique, none above `max_num_seqs`, which is always one of them.

    Args:
        sizes: or the file that has them; None for the default: 1, 2, 4, 8, every multiple of 8 up to 256, of 16 up
            to 512, of 32 up to 1024 …

    Raises:
        ValueError: a size that is no whole number of at least 1.
        OSError: a file that cannot be read.
    """
    if sizes is None:
        wanted = _default_sizes(max_num_seqs)
    else:
        wanted = read_capture_list(sizes) if isinstance(sizes, str | Path) else list(sizes)
    for size in wanted:
        if type(size) is not int or size < 1:
            raise ValueError(f"capture_sizes must be whole numbers of at least 1, got {size!r}")
    return tuple(sorted({size for size in wanted if size < max_num_seqs} | {max_num_seqs}))


def read_capture_list(path: str | Path) -> list[int]:
    """The sizes in a list file: a JSON list, or an object with `capture_sizes`.

    Raises:
        ValueError: the file holds something else.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not a list of capture sizes: {error}") from error
    sizes = found.get(LIST_KEY) if isinstance(found, dict) else found
    if not isinstance(sizes, list):
        raise ValueError(f"{path}: {LIST_KEY} must be a list of whole numbers, got {sizes!r}")
    return sizes


def parse_sizes(text: str) -> list[int]:
    """Sizes from a command line: `1,2,4`, or the name of a list file."""
    parts = [part.strip() for part in text.split(",")]
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else read_capture_list(text)


def _default_sizes(max_num_seqs: int) -> list[int]:
    sizes, doubled = [1, 2, 4, 8, *range(16, FINE_SIZES + 1, 8)], FINE_SIZES
    while doubled < max_num_seqs:
        sizes += range(doubled, 2 * doubled + 1, doubled // 16)
        doubled *= 2
    return sizes


def tightest(
    buckets: Iterable[tuple[BucketKey, CudaGraphConfig]],
    graph_walk: str,
    bs: int,
    num_tokens: int,
    cg_key_info: Hashable = None,
) -> BucketKey | None:
    """The smallest bucket that holds the batch, over all matching configs; the earlier config wins a tie.

    Args:
        num_tokens: input tokens of the batch; each config's multiplier turns them into tokens of a plan.
    """
    fitting = [
        key
        for key, config in buckets
        if config.serves(graph_walk, cg_key_info)
        and key.bs >= bs
        and key.num_tokens >= num_tokens * config.token_multiplier
    ]
    return min(fitting, key=lambda key: (key.num_tokens, key.bs), default=None)


def tightest_batched(
    buckets: Iterable[tuple[BucketKey, CudaGraphConfig]], graph_walk: str, bs: int, cg_key_info: Hashable = None
) -> BucketKey | None:
    """The same before the inputs are built: only batched buckets, whose tokens follow from their size."""
    fitting = [
        key for key, config in buckets if config.is_batched and config.serves(graph_walk, cg_key_info) and key.bs >= bs
    ]
    return min(fitting, key=lambda key: (key.bs, key.num_tokens), default=None)


def largest_batch(configs: Iterable[CudaGraphConfig], buckets: Iterable[BucketKey], graph_walk: str) -> int | None:
    """The largest batch that graphs of a walk take in one piece; None where no config caps it."""
    capping = [config for config in configs if config.graph_walk == graph_walk and config.caps_batch_size]
    infos = {config.cg_key_info for config in capping}
    return max((key.bs for key in buckets if key.graph_walk == graph_walk and key.cg_key_info in infos), default=None)
