"""These tests run in the virtual machine of `make test-rdma` alone: elsewhere there are no such devices.

The process that runs them imports everything, and forks what they need. The contract's suite begins first of all and
goes on beside the tests of whole runs, for the machine has two processors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.devices import CONTRACT, RC, RUNS, Cable
from tests.rdma.forks import Forked
from tests.rdma.runs import Inputs

if "DISAGGKD_RDMA_GUEST" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

_said: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _said:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def say() -> Callable[[str], None]:
    """Have a line printed at the end, whether tests pass or fail."""
    return _said.append


@pytest.fixture(scope="session", autouse=True)
def imported(request: pytest.FixtureRequest) -> None:
    """Everything that a fork needs. Nothing here may open UCX or start a thread: neither survives a fork."""
    assert CONTRACT.exists, "vm.sh made no such devices"
    assert RUNS.exists, "vm.sh made no such devices"
    started_s = time.monotonic()
    from tests.transport import peers  # noqa: F401 - torch comes with it

    _said.append(f"imported torch and transports in {time.monotonic() - started_s:.0f} s")
    # It needs no more than that, so it runs while the rest is imported.
    if any("contract_over_rc" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("contract_over_rc")
    started_s = time.monotonic()
    from tests.system.zygote import preload

    preload()
    _said.append(f"imported what the commands need in {time.monotonic() - started_s:.0f} s")


StartSuite = Callable[..., Forked]


@pytest.fixture(scope="session")
def start_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartSuite]:
    """Start the conformance suite of ucx on a cable: tests on its student's end, their peers on the other."""
    started: list[Forked] = []

    def start(cable: Cable, tls: str, *options: str) -> Forked:
        suite = Path(__file__).parents[1] / "transport"
        files = sorted(suite.glob("test_conformance*.py"))
        env = {**cable.student_env(tls), "DISAGGKD_PEER_NET_DEVICES": cable.teacher_env(tls)["UCX_NET_DEVICES"]}
        started.append(
            Forked(
                *("tests.rdma.suite", "-v", "--timeout=800", "--durations=8", "--backend=ucx", *options, *files),
                cwd=tmp_path_factory.mktemp("suite"),
                env=env,
            )
        )
        return started[-1]

    yield start
    for suite in started:
        suite.end()


@pytest.fixture(scope="session")
def contract_over_rc(start_suite: StartSuite) -> Forked:
    """The whole suite."""
    return start_suite(CONTRACT, RC)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    root = tmp_path_factory.mktemp("inputs")
    making = Forked("tests.rdma.runs", root, cwd=root / "making", env={})
    assert making.wait() == 0, making.log
    return Inputs(root)


StartRun = Callable[..., Any]


@pytest.fixture
def start(inputs: Inputs, tmp_path: Path) -> Iterator[StartRun]:
    """Start a Teacher, a Student or any other command, which ends with the test."""
    started: list[Forked] = []

    def go(kind: Callable[..., Forked], *arguments: object, name: str, env: dict[str, str]) -> Forked:
        started.append(kind(*arguments, cwd=tmp_path / name, env=env))
        return started[-1]

    yield go
    for command in started:
        command.end()
