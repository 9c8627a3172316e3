"""Runs tests/kernels/device on the CPU: the interpreter must be on before the kernels are defined."""

import os
import subprocess
import sys
from pathlib import Path

DEVICE_TESTS = Path(__file__).parent / "device"


def test_kernels_through_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", str(DEVICE_TESTS)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:]


def test_the_interpreter_set_after_the_import_is_ignored() -> None:
    """B51: the kernels were compiled ones by then, and CPU tensors go to the references."""
    code = (
        "import os, torch; from ostinato import kernels; os.environ['TRITON_INTERPRET'] = '1'; "
        "print(kernels.swiglu(torch.ones(1, 4)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "0.7311" in run.stdout
