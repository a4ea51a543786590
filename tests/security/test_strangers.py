"""Strangers at the ports of a run under way: they get nothing, cost little, and change nothing."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from ring.core import codec
from ring.core.messages import Goodbye
from tests.security.conftest import House
from tests.security.strangers import PATIENCE_S, READY, Stranger, frame, greeting
from tests.seeds import MASTER_SEED
from tests.system.conftest import Start
from tests.system.processes import HANG_GUARD_S, Command, curve

MIB = 2**20
#: What a process may grow by under attack: frames that wait to be read, and what the allocator keeps.
MAX_GROWTH_BYTES = 128 * MIB


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def listening_ports(pid: int) -> list[int]:
    """TCP ports that a process listens at."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue  # closed meanwhile
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            found.append(int(fields[1].rpartition(":")[2], 16))
    return found


@contextmanager
def besieged(*endpoints: str, seed: int) -> Iterator[list[Stranger]]:
    """Two strangers at each endpoint, who come again and again until the block ends."""
    print(f"strangers of seed {seed}")
    rng = random.Random(seed)
    strangers = [Stranger(endpoint, rng.randrange(2**32)) for endpoint in endpoints for _ in range(2)]
    over = threading.Event()

    def visit(stranger: Stranger) -> None:
        while not over.is_set():
            stranger.knock()
        stranger.leave()

    threads = [threading.Thread(target=visit, args=(stranger,)) for stranger in strangers]
    for thread in threads:
        thread.start()
    try:
        yield strangers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + HANG_GUARD_S
    while not holds():
        assert time.monotonic() < deadline_s, f"waited {HANG_GUARD_S:g} s for {what}"
        time.sleep(0.01)


def check_it_was_nothing(command: Command, *, fds: int, bytes_before: int) -> None:
    """The process is alive, holds what it held, and has not grown by more than it may."""
    wait_until(lambda: num_fds(command.pid) <= fds, f"{fds} descriptors, of {num_fds(command.pid)}")
    assert command.poll() is None, command.tail()
    assert resident_bytes(command.pid) - bytes_before < MAX_GROWTH_BYTES
    assert "Traceback" not in command.errors
    assert "\x1b" not in command.errors


@pytest.mark.parametrize("with_keys", [True, False], ids=["keys", "plain"])
def test_a_run_goes_on_unchanged_with_strangers_at_every_port(
    house: House, start_teacher: Start, start_student: Start, quiet_curve: list[dict[str, Any]], with_keys: bool
) -> None:
    teacher_keys = ("--auth", house.teacher.directory) if with_keys else ()
    student_keys = ("--auth", house.student.directory) if with_keys else ()
    # Places enough for those strangers that get as far as a hello.
    teacher = start_teacher(*teacher_keys, "--max-students", 4096)
    fds, bytes_before = num_fds(teacher.pid), resident_bytes(teacher.pid)
    with besieged(teacher.endpoint, seed=MASTER_SEED) as at_the_teacher:
        # It holds still after its first step: on a busy machine it could have ended before anybody found its port.
        student = start_student(
            *("--teacher", teacher.endpoint, "--transport", "zmq", *student_keys, "--peer-timeout", HANG_GUARD_S),
            command=("tests.system.dying_student", "stop-line:1"),
        )
        student.until_held()
        (data_port,) = listening_ports(student.pid)
        with besieged(f"tcp://127.0.0.1:{data_port}", seed=MASTER_SEED + 1_000_000) as at_the_student:
            wait_until(lambda: all(sum(s.visits.values()) for s in at_the_student), "visits at the trainer")
            student.send(signal.SIGCONT)
            student.succeed()
            wait_until(lambda: all(len(s.visits) == 12 for s in at_the_teacher), "visits of every kind")
    assert curve(student.out) == quiet_curve
    check_it_was_nothing(teacher, fds=fds, bytes_before=bytes_before)
    # Of the data port, and of the control port with keys, nobody got more than zmq's greeting and a refusal.
    for stranger in [*at_the_student, *(at_the_teacher if with_keys else ())]:
        assert stranger.most_received <= 64


def received_by(endpoint: str, *words: bytes) -> bytes:
    """All that comes back to somebody who says these words one after the other over a bare socket."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    received = b""
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=HANG_GUARD_S) as connection:
        for number, word in enumerate(words):
            connection.sendall(word)
            # What was said first was answered, or led to the door, before the rest is said.
            while number == 0 and len(received) < 64 and (data := connection.recv(64)):
                received += data
        connection.settimeout(10 * PATIENCE_S)
        while data := connection.recv(65536):
            received += data
    return received


def test_with_keys_a_stranger_learns_that_something_speaks_curve_and_nothing_else(
    house: House, start_teacher: Start
) -> None:
    teacher = start_teacher("--auth", house.teacher.directory)
    hello_of_nobody = frame(4, b"\x05HELLO\x01\x00" + bytes(72) + random.Random(3).randbytes(120))
    commands = (READY, hello_of_nobody, frame(4, b"\x08INITIATE" + bytes(300)), frame(0, b"hello"), bytes(500))
    announced = greeting(b"CURVE")[10:]
    for mechanism in (b"CURVE", b"NULL", b"PLAIN"):
        for command in commands:
            received = received_by(teacher.endpoint, greeting(mechanism), command)
            assert announced.startswith(received[10:])
            # With another mechanism it is shown the door before it was told even that.
            assert mechanism != b"CURVE" or len(received) == 64


class Malice:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.case(64)
def test_case_64_a_pickle_sent_to_a_teacher_is_refused_and_never_run(
    endpoint: str, start_student: Start, quiet_curve: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Case 64; whoever unpickles it makes the file, as the last lines show."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    trap = tmp_path / "opened"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(Malice(trap), protocol=protocol)
        for frames, said in (([data], "malformed frame"), ([data, data], "a message of 2 frames; allowed: 1")):
            link = context.socket(zmq.DEALER)
            link.connect(endpoint)
            link.send_multipart(frames)
            assert link.poll(HANG_GUARD_S * 1e3)
            answer = codec.decode(link.recv())
            assert isinstance(answer, Goodbye)
            assert said in answer.reason
            link.close(linger=0)
    context.term()
    student = start_student("--teacher", endpoint, "--transport", "zmq")
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert not trap.exists()
    pickle.loads(data)
    assert trap.exists()
