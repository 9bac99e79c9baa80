"""Fixtures and rules of the whole suite: devices, one thread, what is left out and why."""

from __future__ import annotations

import os

# Before torch starts its pool: two test processes then share two cores, and speed never varies.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from _frameworks import pytest_runtest_setup as pytest_runtest_setup  # the mark `framework`

import truncdet


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ci", action="store_true", help="also run what is marked ci")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    return f"truncdet: {truncdet.build_info()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    kept, left_out = [], []
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        slow = item.get_closest_marker("ci") and not config.getoption("--ci")
        (left_out if slow else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs the test on the CPU and, where there is one, on the GPU."""
    return torch.device(request.param)
