"""The lazy state machine, without torch."""

import ast
import logging
from pathlib import Path

import pytest

from ostinato import InferenceGraphCapture, StepMode
from ostinato.runtime import inference_graph_capture


def machine(warmup_steps: int = 3, num_steps: int = 0) -> InferenceGraphCapture:
    one = InferenceGraphCapture(warmup_steps).enabled(True)
    for _ in range(num_steps):
        one.advance()
    return one


def test_warmup_below_the_threshold() -> None:
    assert [machine(3, n).step_mode for n in range(3)] == [StepMode.WARMUP] * 3


def test_capture_at_the_threshold() -> None:
    assert machine(3, 3).step_mode is StepMode.CAPTURE


def test_replay_after_the_capture() -> None:
    one = machine(3, 3)
    one.record_capture(7, batch_size=4, query_len=1)
    one.advance()
    assert one.step_mode is StepMode.REPLAY
    assert one.is_captured
    assert one.graph_id == 7
    assert one.capture_attempted


@pytest.mark.parametrize("num_steps", range(6))
def test_advance_adds_one_in_every_mode(num_steps: int) -> None:
    one = machine(2, num_steps)
    one.advance()
    assert one.num_steps == num_steps + 1


def test_the_same_shape_passes() -> None:
    one = machine()
    one.record_capture(1, batch_size=4, query_len=1)
    assert one.check_static_shape(4, 1)


@pytest.mark.parametrize(
    ("shape", "message"), [((8, 1), "batch size 4, but the step has 8"), ((4, 2), "query length 1, but the step has 2")]
)
def test_another_shape_fails_with_a_warning(
    shape: tuple[int, int], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine()
    one.record_capture(1, batch_size=4, query_len=1)
    with caplog.at_level(logging.WARNING):
        assert not one.check_static_shape(*shape)
    assert message in caplog.text


def test_not_captured_before_record_capture() -> None:
    one = machine(1, 1)
    assert not one.is_captured
    assert one.graph_id is None
    assert not one.check_static_shape(4, 1)


@pytest.mark.parametrize("num_steps", [0, 3, 50])
def test_warmup_whatever_the_count_when_not_enabled(num_steps: int) -> None:
    one = InferenceGraphCapture(3)
    for _ in range(num_steps):
        one.advance()
    assert one.step_mode is StepMode.WARMUP
    one.enabled(True).enabled(False)
    assert one.step_mode is StepMode.WARMUP


def test_a_failed_attempt_is_not_repeated_and_means_eager() -> None:
    one = machine(2, 2)
    assert one.step_mode is StepMode.CAPTURE
    one.advance()
    assert (one.step_mode, one.is_captured, one.capture_attempted) == (StepMode.REPLAY, False, True)
    one.disable()
    for _ in range(5):
        one.advance()
        assert one.step_mode is StepMode.WARMUP
    assert one.enabled(True).step_mode is StepMode.WARMUP, "disabled for good"


@pytest.mark.parametrize("warmup_steps", [0, -4, 1])
def test_warmup_steps_are_at_least_one(warmup_steps: int) -> None:
    assert machine(warmup_steps, 0).step_mode is StepMode.WARMUP
    assert machine(warmup_steps, 1).step_mode is StepMode.CAPTURE


def test_the_module_imports_no_torch() -> None:
    tree = ast.parse(Path(inference_graph_capture.__file__).read_text())
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    modules |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert modules == {"logging", "enum"}
