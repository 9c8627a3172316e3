"""The graphs of an engine at its start: captured, or made ready for late captures, and checked."""

import logging
from dataclasses import dataclass

from .bucket_capture import CaptureSummary, Progress
from .decode_graphs import DecodeGraphs
from .graph_aliases import find_aliases
from .graph_reason import Path
from .graph_self_test import fill_read_blocks, self_test
from .phases import Phases
from .rank_agreement import fail_if_graphs_required

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodePolicy:
    """How decode steps are meant to run.

    Attributes:
        path: of steps without an eager piece; EAGER: no graphs at all.
        forced: eager, on the rows and buckets that graphs would run.
        lazy_steps: eager steps of a bucket before its capture; None: everything is captured at start.
        prompt_lazy_steps: prompts of a bucket that run eagerly before its capture, which is never at start.
        required: eager steps that nobody asked for are errors.
        self_test: compare every bucket with its Python, once it is captured.
    """

    path: Path = Path.EAGER
    forced: bool = False
    lazy_steps: int | None = None
    prompt_lazy_steps: int = 1
    required: bool = False
    self_test: bool = False


def start_graphs(
    graphs: DecodeGraphs, policy: DecodePolicy, progress: Progress | None, phases: Phases, is_rehearsed: bool
) -> CaptureSummary | None:
    """Capture every bucket of the policy's path, and check them; None where they are captured late.

    Buckets are warmed up twice: where captures were rehearsed, once there and once here.

    Raises:
        GraphsRequiredError: graphs are required and some are missing; lists them all.
        RuntimeError: a tensor that must outlive replays lies where one may overwrite it.
    """
    summary = None
    if policy.lazy_steps is not None:
        with phases.phase("warm-up"):
            graphs.warm_up(policy.path)
        if policy.self_test:
            fill_read_blocks(graphs)
    else:
        with phases.phase("capture"):
            summary = graphs.capture_path(policy.path, progress or _log_progress, 1 if is_rehearsed else None)
        _log(graphs, summary)
        with phases.phase("aliases"):
            aliases = find_aliases(graphs)
        if aliases:
            raise RuntimeError(f"graphs would overwrite what must last: {'; '.join(aliases)}")
        if policy.self_test:
            with phases.phase("self-test"):
                num_tested = self_test(graphs, policy.path)
            logger.info("compared %d graphs with their Python in %.1f s", num_tested, phases.seconds["self-test"])
    fail_if_graphs_required(graphs.drops(), policy.required)
    return summary


def _log(graphs: DecodeGraphs, summary: CaptureSummary) -> None:
    logger.info(
        "captured %d of %d CUDA graphs (decode) in %.1f s, %.2f GiB",
        summary.num_captured,
        summary.num_buckets,
        summary.seconds,
        summary.num_bytes / 2**30,
    )
    logger.info("%s", graphs.ledger.total_line())


def _log_progress(done: int, total: int) -> None:
    logger.info("Capturing CUDA graphs (decode): %d/%d", done, total)
