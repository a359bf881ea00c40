"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnkit import dispatch
from attnkit.backends import triton
from attnkit.testing import recorded_backends

# These tests are made of CPU tensors.  Triton's interpreter takes over a process, so the Triton
# kernels have one to themselves; the CUDA kernels' tests are test_cuda_*.py, in an emulator.
TESTED = ["triton"] if triton.INTERPRETED else ["cpu", "reference"]


def pytest_configure(config: pytest.Config) -> None:
    text = "isa: also run with every instruction set of the CPU kernels"
    config.addinivalue_line("markers", text)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # shapes are small; tests of threads ask for more themselves


@pytest.fixture(params=TESTED)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend by name, forced for the test; skipped, with its reason, where it cannot run."""
    reason = dispatch.status()[request.param]
    chosen = getattr(request.node, "callspec", None)
    if request.param == "triton" and chosen and torch.float64 in chosen.params.values():
        pytest.skip("triton: float64 is for the other backends")
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    with dispatch.use_backend(request.param):
        yield request.param


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """Grows by "cpu.forward" and the like with every call that reaches a backend."""
    with recorded_backends() as names:
        yield names
