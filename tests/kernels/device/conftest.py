"""The kernels against their references in float64: on a GPU, and on the CPU when the interpreter defined them.

The interpreter needs TRITON_INTERPRET=1 before the import, so it has a pytest process of its own; see
tests/kernels/test_interpreter.py.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.utils.deterministic

from ostinato.kernels._triton import INTERPRETED

# The interpreter multiplies the bit patterns of bf16 (B50), so that dtype is for the device.
DTYPES = {"cpu": ("float32", "float16"), "cuda": ("float32", "float16", "bfloat16")}
PLACES = [
    pytest.param((device, getattr(torch, dtype)), id=f"{device}-{dtype}", marks=[pytest.mark.gpu] * (device == "cuda"))
    for device in (["cpu"] * INTERPRETED + ["cuda"])
    for dtype in DTYPES[device]
]

# Of ‖out - truth‖ / ‖truth‖. One rounding of the result costs about 2**-24, 2**-11 or 2**-8 relative, over sqrt(3); the
# rounded operands of a projection or of P V cost about as much again.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Device and dtype."""
    return request.param


@pytest.fixture
def device(place: tuple[str, torch.dtype]) -> str:
    return place[0]


@pytest.fixture
def dtype(place: tuple[str, torch.dtype]) -> torch.dtype:
    return place[1]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Through the interpreter, whatever a launcher allocates is NaN, or an integer's largest, until it is written."""
    if not INTERPRETED:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def vast(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """`vast(*shape)` is memory that nobody has touched; on a CPU only the pages exist that a test then touches."""

    def make(*shape: int) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
            return torch.empty(shape, dtype=dtype, device=device)

    return make


@pytest.fixture
def draw(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """`draw(*shape)` is standard normal in the test's dtype, on its device, and the same on every device."""

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).to(device, dtype)

    return make


@pytest.fixture
def assert_near(dtype: torch.dtype) -> Callable[..., None]:
    """`assert_near(out, truth)`: close in the norm, and no element far off."""

    def check(out: torch.Tensor, truth: torch.Tensor) -> None:
        out, truth = out.double().cpu(), truth.double().cpu()
        assert out.shape == truth.shape
        assert out.isfinite().all(), "not finite, or never written"
        bound = TOLERANCE[dtype]
        assert (out - truth).norm() <= bound * truth.norm()
        assert (out - truth).abs().max() <= 8 * bound * truth.abs().max()

    return check
