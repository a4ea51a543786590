"""These tests run in the virtual machine of `make test-rdma` alone: elsewhere there are no such devices."""

from __future__ import annotations

import os

import pytest

from tests.ucx.conftest import inputs, start

__all__ = ["inputs", "start"]

if "DISAGGKD_RDMA_GUEST" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def guest() -> None:
    assert os.path.exists("/sys/class/infiniband/rxe0"), "there is no soft-RoCE device"
