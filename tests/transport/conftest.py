"""Every conformance test runs for every registered backend; what is skipped must be in the list of gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.transport import gaps
from tests.transport.peers import Peer
from transport import registry
from transport.contract import Receiver
from transport.memory import SlotArena

_GAP = "gap: "


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", help="run the conformance suite for this transport alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--backend", default=None)
        metafunc.parametrize("backend", [chosen] if chosen else registry.names(same_process=True))


def pytest_runtest_setup(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "backend" in callspec.params:
        gap = gaps.find(item.originalname, callspec.params["backend"])
        if gap is not None:
            pytest.skip(f"{_GAP}{gap.backend}: {gap.reason}; removed by {gap.removed_by}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.skipped and not (isinstance(report.longrepr, tuple) and f"Skipped: {_GAP}" in report.longrepr[2]):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, but is not in tests/transport/gaps.py: {report.longrepr}"
    return report


@pytest.fixture(scope="session", autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A place for sockets that no other process uses, so that what is left there was left by these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture
def make_peer(backend: str) -> Iterator[Callable[[], Peer]]:
    """Makes the other sides of a test; they end with it."""
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer(in_thread=backend == "local"))
        return peers[-1]

    yield make
    for peer in peers:
        peer.end()


@pytest.fixture
def peer(make_peer: Callable[[], Peer]) -> Peer:
    return make_peer()


@pytest.fixture
def make_receiver(backend: str) -> Iterator[Callable[..., tuple[SlotArena, Receiver]]]:
    """Makes our own student sides; they end with the test."""
    made: list[tuple[SlotArena, Receiver]] = []

    def make(*, num_slots: int, slot_bytes: int, arena: SlotArena | None = None) -> tuple[SlotArena, Receiver]:
        arena = arena or SlotArena(num_slots, slot_bytes)
        made.append((arena, registry.load(backend).open_receiver(arena, bind_host="127.0.0.1")))
        return made[-1]

    yield make
    for arena, receiver in made:
        receiver.close()
        receiver.forget()
        arena.close()
