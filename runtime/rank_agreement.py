"""Ranks keep the same graphs, or none start."""

import os
from collections.abc import Sequence
from typing import Any

import torch

REQUIRE_VARIABLE = "OSTINATO_REQUIRE_CUDA_GRAPHS"


class GraphsRequiredError(RuntimeError):
    """Graphs are required, and a step would run without."""


def agree_across_ranks(comm_group: Any, flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Each flag, true where it is true on every rank of the group.

    A capture fails on one rank alone; were its graph kept on another, one would replay while the other runs eagerly,
    and both would hang in the first collective. The order of the flags comes from the configs, equal everywhere.

    Args:
        comm_group: a process group, or None where there is one rank.
        device: where the group reduces, CPU for gloo.

    Raises:
        RuntimeError: the ranks have different numbers of flags.
    """
    if comm_group is None:
        return list(flags)
    from torch import distributed

    counts = torch.tensor([len(flags), -len(flags)], dtype=torch.int64, device=device)
    distributed.all_reduce(counts, op=distributed.ReduceOp.MIN, group=comm_group)
    fewest, most = int(counts[0]), -int(counts[1])
    if fewest != most:
        raise RuntimeError(f"ranks must agree on as many graphs, but one has {fewest} and another {most}")
    agreed = torch.tensor(list(flags), dtype=torch.int64, device=device)
    if flags:
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN, group=comm_group)
    return [bool(flag) for flag in agreed.tolist()]


def barrier(comm_group: Any) -> None:
    """Wait for every rank of the group."""
    if comm_group is not None:
        from torch import distributed

        distributed.barrier(group=comm_group)


def graphs_required(required: bool = False) -> bool:
    """Whether graphs are required: by `required`, or by the environment, `OSTINATO_REQUIRE_CUDA_GRAPHS=1`."""
    return required or os.environ.get(REQUIRE_VARIABLE) == "1"


def fail_if_graphs_required(missing: Sequence[str], required: bool = False) -> None:
    """Refuse to start where graphs are required, as `graphs_required` says, and some are missing.

    Raises:
        GraphsRequiredError: lists all that is missing.
    """
    if missing and graphs_required(required):
        lines = "\n".join(f"  {one}" for one in missing)
        raise GraphsRequiredError(f"CUDA graphs are required, but {len(missing)} are missing:\n{lines}")
