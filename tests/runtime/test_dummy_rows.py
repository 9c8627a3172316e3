"""Padding rows: names, handles, and that each is opened once."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.dummy_rows import DummyRowPool, dummy_metadata, dummy_rid_handle, dummy_rid_name


class Rows:
    """A step runner that notes what happens to rows."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.resets: list[tuple[list[int], bool]] = []

    def open_rows(self, rids: Sequence[int]) -> None:
        self.opened += rids

    def reset_rows(self, rids: Sequence[int], free: bool) -> None:
        self.resets.append((list(rids), free))

    def declare(self, graph_walk: str, rows: Any, metadata: Any) -> None: ...
    def plan(self, step: Any, target: Any) -> None: ...
    def commit(self, step: Any) -> None: ...


@given(st.text(), st.text())
def test_handles_are_negative_and_one_to_one_with_names(a: str, b: str) -> None:
    assert dummy_rid_handle(a) < -(2**63)
    assert dummy_rid_name(dummy_rid_handle(a)) == a
    assert (dummy_rid_handle(a) == dummy_rid_handle(b)) == (a == b)


@pytest.mark.parametrize("handle", [0, 5, -2])
def test_what_is_no_handle_has_no_name(handle: int) -> None:
    with pytest.raises(ValueError, match=str(handle)):
        dummy_rid_name(handle)


def test_handles_are_stable_and_differ_between_pools_keys_and_rows() -> None:
    rows = Rows()
    a, b = DummyRowPool("a", rows), DummyRowPool("b", rows)
    every = [pool.handles(key, 4) for pool in (a, b) for key in ("x", ("x", 0))]
    assert len({rid for rids in every for rid in rids}) == 16
    assert all(rid < 0 for rids in every for rid in rids)
    assert a.handles("x", 2) == a.handles("x", 4)[:2]
    assert DummyRowPool("a", Rows()).handles("x", 4) == a.handles("x", 4)
    assert rows.opened == []


def test_a_handle_is_no_index_of_a_tensor() -> None:
    [rid] = DummyRowPool("decode", Rows()).handles("k", 1)
    with pytest.raises(ValueError, match="Overflow"):
        torch.zeros(4)[rid]


def test_each_row_is_opened_once() -> None:
    rows = Rows()
    pool = DummyRowPool("a", rows)
    first = pool.ensure("x", 2)
    assert first == pool.handles("x", 2)
    assert rows.opened == first
    assert pool.ensure("x", 4) == pool.handles("x", 4)
    pool.reset(first)
    pool.ensure("x", 3)
    assert rows.opened == pool.handles("x", 4)


def test_reset_and_release() -> None:
    rows = Rows()

    class Storage:
        def __init__(self) -> None:
            self.seen: list[bool] = []

        def reset_rows(self, rids: Sequence[int], free: bool) -> None:
            self.seen.append(free)

    storage = Storage()
    pool = DummyRowPool("a", rows, [storage, object()])
    rids = pool.ensure("x", 3)
    pool.reset(rids[:1])
    pool.release_all()
    assert rows.resets == [(rids[:1], False), (sorted(rids), True)]
    assert storage.seen == [False, True]
    assert pool.ensure("x", 3) == rids
    assert len(rows.opened) == 3, "released rows stay open"


def test_metadata_stands_in_for_requests() -> None:
    info = dummy_metadata([-3, -4], "decode")
    assert set(info) == {-3, -4}
    assert all(one.is_padding and one.graph_walk == "decode" and one.request is None for one in info.values())
