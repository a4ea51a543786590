"""The threads of a teacher end together, whatever ended one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from ring.core.errors import LocalProtocolError
from ring.local_control import local_pair
from teacher import threads
from teacher.forward import TeacherModel
from teacher.load import prepare
from teacher.service import ServiceConfig, TeacherService
from teacher.threads import Ending, ThreadEnded, run_service
from tests.tiny_models import tiny_model, tiny_tokenizer

HANG_GUARD_S = 60.0
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


class Unheard(BaseException):
    """What nobody catches who catches an Exception."""


class Unspeakable(BaseException):
    """It can't even be shown."""

    def __str__(self) -> str:
        raise MemoryError


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late this process is, the watch may not end it."""
    for name in ("DRAIN_TIMEOUT_S", "CLOSE_TIMEOUT_S", "FAILED_TIMEOUT_S"):
        monkeypatch.setattr(threads, name, 10 * HANG_GUARD_S)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Whoever started these tests may ignore some: `nohup`, or the `&` of a script."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def model() -> TeacherModel:
    return prepare(tiny_model("qwen3", seed=3), tiny_tokenizer().get_vocab(), name="tiny")


@pytest.fixture
def service(model: TeacherModel) -> Iterator[TeacherService]:
    _, port = local_pair()
    made = TeacherService(model, port, ServiceConfig(replica="r", backends=("local",), epoch="e"))
    yield made
    made.close()


def fails_with(error: BaseException) -> Callable[..., bool]:
    def fail(*_: object) -> bool:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "MemoryError: ;"),
        (LocalProtocolError("slot 3"), "LocalProtocolError: slot 3;"),
        (Unheard("of any kind"), "Unheard: of any kind;"),
        (SystemExit(0), "SystemExit: 0;"),
        (Unspeakable(), "Unspeakable;"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, BaseException) else "",
)
def test_whatever_ends_the_io_thread_ends_the_teacher(
    service: TeacherService, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    monkeypatch.setattr(TeacherService, "io_turn", fails_with(error))
    with Ending("test") as ending, pytest.raises(ThreadEnded, match=f"that talks to students ended: {words}") as raised:
        run_service(service, ending)
    assert raised.value.exit_code == 1
    assert raised.value.__cause__ is error
    check_nothing_left(service)


def test_an_io_thread_that_ends_without_a_word_ends_the_teacher(
    service: TeacherService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that had no memory to say why it ended."""
    monkeypatch.setattr(threads, "talk", lambda *_: None)
    with Ending("test") as ending, pytest.raises(ThreadEnded, match="ended: without a word; nothing is answered"):
        run_service(service, ending)
    check_nothing_left(service)


@pytest.mark.parametrize("error", [MemoryError(), Unheard()], ids=lambda error: type(error).__name__)
def test_whatever_ends_the_forward_passes_ends_the_io_thread(
    service: TeacherService, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(TeacherService, "compute_turn", fails_with(error))
    with Ending("test") as ending, pytest.raises(type(error)):
        run_service(service, ending)
    check_nothing_left(service)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_asks_for_the_end_and_the_first_one_is_remembered(
    service: TeacherService, number: signal.Signals
) -> None:
    def two_signals() -> None:
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)

    before = [signal.getsignal(one) for one in SIGNALS]
    with Ending("test") as ending:
        run_service(service, ending, ready=two_signals)
    assert ending.signal == number
    assert [signal.getsignal(one) for one in SIGNALS] == before
    check_nothing_left(service)


def test_a_signal_that_is_ignored_at_the_start_stays_ignored(service: TeacherService) -> None:
    def two_signals() -> None:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Ending("test") as ending:
            run_service(service, ending, ready=two_signals)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ending.signal == signal.SIGTERM


#: Passes that take long, but return. The watch looks at each; what it takes for hanging is less than all together.
SLOW = """
import signal, sys, time
from teacher import threads
threads.CLOSE_TIMEOUT_S = threads.FAILED_TIMEOUT_S = 5.0
threads.DRAIN_TIMEOUT_S, threads.LOOK_EVERY_S = 0.0, 0.05
with threads.Ending("test") as ending:
    signal.raise_signal(signal.SIGTERM)
    for _ in range(160):
        time.sleep(0.05)
        ending.num_turns += 1
    ending.is_over = True
"""


def test_a_drain_whose_passes_return_is_not_taken_for_one_that_hangs() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", SLOW], env=environment, timeout=2 * HANG_GUARD_S, check=False)
    assert ended.returncode == 0


def check_nothing_left(service: TeacherService) -> None:
    """No thread is, and the service is closed."""
    assert [one.name for one in threading.enumerate() if one.name.startswith("teacher-")] == []
    assert service._closed


#: The stream that the last words go to is not read by anybody, and full.
UNREAD = """
import os
from teacher import threads
threads.FAILED_TIMEOUT_S = 0.1
read_fd, write_fd = os.pipe()
os.set_blocking(write_fd, False)
try:
    while True:
        os.write(write_fd, bytes(4096))
except BlockingIOError:
    os.set_blocking(write_fd, True)
os.dup2(write_fd, 2)
with threads.Ending("test") as ending:
    ending.start(lambda: None)
    os.read(os.pipe()[0], 1)
"""


def test_a_process_whose_words_nobody_reads_ends_too() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", UNREAD], env=environment, timeout=2 * HANG_GUARD_S, check=False)
    assert ended.returncode == 1
