"""Fixtures for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels for GPUs are run by Triton's interpreter. It must know before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; tests of threads set their own number.
    torch.set_num_threads(1)

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under nohup. What tests start would inherit it, and a terminal that is closed could not end it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so that a value that nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
