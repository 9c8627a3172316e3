"""Which sizes are captured, keys, and the choice of a bucket; pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.graph_buckets import (
    BucketKey,
    CudaGraphConfig,
    capture_sizes,
    largest_batch,
    tightest,
    tightest_batched,
)
from ostinato.runtime.sample_road import SampleRoad


@pytest.mark.parametrize(
    ("sizes", "max_num_seqs", "expected"),
    [
        pytest.param(None, 1, (1,), id="one"),
        pytest.param(None, 4, (1, 2, 4), id="listed"),
        pytest.param(None, 5, (1, 2, 4, 5), id="off-grid"),
        pytest.param(None, 30, (1, 2, 4, 8, 16, 24, 30), id="30"),
        pytest.param(None, 256, (1, 2, 4, 8, *range(16, 257, 8)), id="35-sizes"),
        pytest.param(None, 257, (1, 2, 4, 8, *range(16, 257, 8), 257), id="257"),
        pytest.param(
            None, 700, (1, 2, 4, 8, *range(16, 257, 8), *range(272, 513, 16), *range(544, 700, 32), 700), id="coarser"
        ),
        pytest.param([64, 3, 3, 1000], 70, (3, 64, 70), id="custom"),
        pytest.param([], 7, (7,), id="empty"),
    ],
)
def test_b41_sizes_are_sorted_unique_and_end_in_the_maximum(
    sizes: list[int] | None, max_num_seqs: int, expected: tuple[int, ...]
) -> None:
    assert capture_sizes(sizes, max_num_seqs) == expected
    assert len(capture_sizes(None, 256)) == 35


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match=repr(size)):
        capture_sizes([1, size], 8)  # type: ignore[list-item]


def buckets(*configs: CudaGraphConfig) -> list[tuple[BucketKey, CudaGraphConfig]]:
    return [(key, config) for config in configs for key in config.bucket_keys()]


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(1, 320))
def test_b41_the_smallest_size_that_holds_the_batch(sizes: set[int], bs: int) -> None:
    config = CudaGraphConfig("decode", tuple(sizes))
    key = tightest(buckets(config), "decode", bs, bs)
    fitting = [size for size in sizes if size >= bs]
    assert (key is None) == (not fitting)
    if key is not None:
        assert key == config.key(min(fitting))
        assert key == tightest_batched(buckets(config), "decode", bs)


@given(st.sets(st.integers(1, 64), min_size=1), st.integers(1, 4), st.integers(1, 3))
def test_every_captured_key_is_found_by_a_look_up(sizes: set[int], tokens_per_row: int, multiplier: int) -> None:
    """One function builds both keys, in requests; tokens follow."""
    config = CudaGraphConfig("verify", tuple(sizes), tokens_per_row=tokens_per_row, token_multiplier=multiplier)
    for key in config.bucket_keys():
        assert tightest(buckets(config), "verify", key.bs, key.bs * tokens_per_row) == key
        assert key.num_tokens == key.bs * tokens_per_row * multiplier


def test_keys_come_largest_first() -> None:
    config = CudaGraphConfig("x", (2, 8, 4), tokens_per_row=None, token_buckets=(16, 64))
    assert [(key.bs, key.num_tokens) for key in config.bucket_keys()] == [
        (8, 64),
        (8, 16),
        (4, 64),
        (4, 16),
        (2, 64),
        (2, 16),
    ]


def test_the_tightest_over_all_configs_not_the_first_declared() -> None:
    wide = CudaGraphConfig("prefill", (4,), tokens_per_row=None, token_buckets=(256, 64))
    fine = CudaGraphConfig("prefill", (4,), tokens_per_row=None, token_buckets=(96,))
    doubled = CudaGraphConfig("prefill", (4,), tokens_per_row=None, token_buckets=(45,), token_multiplier=2)
    every = buckets(wide, fine, doubled)
    assert tightest(every, "prefill", 3, 65) == fine.key(4, 96)
    assert tightest(every, "prefill", 3, 40) == wide.key(4, 64)
    assert tightest(every, "prefill", 3, 45) == wide.key(4, 64)
    assert tightest(buckets(doubled), "prefill", 3, 45) == BucketKey("prefill", None, 4, 90)
    assert tightest(buckets(doubled), "prefill", 3, 46) is None
    assert tightest(every, "prefill", 5, 40) is None
    assert tightest(every, "decode", 3, 40) is None


def test_packed_buckets_wait_for_the_inputs() -> None:
    packed = CudaGraphConfig("prefill", (4,), tokens_per_row=None, token_buckets=(64,))
    assert tightest_batched(buckets(packed), "prefill", 2) is None
    assert tightest(buckets(packed), "prefill", 2, 10) == packed.key(4, 64)


@pytest.mark.parametrize("fields", [{"tokens_per_row": None}, {"token_buckets": (8,)}])
def test_a_config_is_batched_or_packed(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"batched .* or packed"):
        CudaGraphConfig("x", (1,), **fields)  # type: ignore[arg-type]


def test_key_info_is_equal_or_covers() -> None:
    greedy = CudaGraphConfig("decode", (4,), cg_key_info=SampleRoad())
    random = CudaGraphConfig("decode", (4,), cg_key_info=SampleRoad(random=True, top_k=True))
    every = buckets(greedy, random)
    assert tightest_batched(every, "decode", 2, SampleRoad()) == greedy.key(4)
    assert tightest_batched(every, "decode", 2, SampleRoad(random=True)) == random.key(4)
    assert tightest_batched(every, "decode", 2, SampleRoad(logprobs=True)) is None
    plain = CudaGraphConfig("decode", (4,), cg_key_info="a")
    assert tightest_batched(buckets(plain), "decode", 2, "a") == plain.key(4)
    assert tightest_batched(buckets(plain), "decode", 2, "b") is None


def test_only_capping_configs_cap_the_batch() -> None:
    capping = CudaGraphConfig("decode", (1, 8))
    accelerating = CudaGraphConfig("decode", (1, 64), cg_key_info="extra", caps_batch_size=False)
    both = [*capping.bucket_keys(), *accelerating.bucket_keys()]
    assert largest_batch([capping, accelerating], both, "decode") == 8
    assert largest_batch([accelerating], accelerating.bucket_keys(), "decode") is None
    assert largest_batch([capping], capping.bucket_keys(), "prefill") is None
