"""What is said arrives whole and in order, and holds up nobody where it can't."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from ring import outputs
from ring.outputs import open_standard_streams, unhindered_outputs

#: Only ends tests that hang.
HANG_GUARD_S = 120.0
#: More than a pipe takes.
LINES = [f"line {i} of a run that says a lot, and nobody reads it as yet" for i in range(5000)]


class Pipe:
    """Its writing side may be `sys.stdout`."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.stdout = open(writing, "w")  # noqa: SIM115 - closed when all was read

    @contextlib.contextmanager
    def spoken_into(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self.stdout), unhindered_outputs():
            yield

    def read_to_the_end(self) -> str:
        self.stdout.close()
        said = b""
        while received := os.read(self.reading, 65536):
            said += received
        return said.decode()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stdout.close()
        with contextlib.suppress(OSError):
            os.close(self.reading)


class Reader:
    """Reads a pipe to a last line, once it is started."""

    def __init__(self, pipe: Pipe, last: str) -> None:
        self._received: list[str] = []
        self._thread = threading.Thread(target=lambda: self._received.append(read_until(pipe, last)), daemon=True)
        self.start = self._thread.start

    def said(self) -> str:
        self._thread.join(HANG_GUARD_S)
        assert self._received, "the last line never came"
        return self._received[0]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_a_pipe_that_nobody_reads_as_yet_holds_up_nobody_and_gets_all_of_it(pipe: Pipe) -> None:
    received: list[bytes] = []
    wanted_bytes = sum(len(line) + 1 for line in LINES)

    def read() -> None:
        while sum(map(len, received)) < wanted_bytes:
            received.append(os.read(pipe.reading, 65536))

    reader = threading.Thread(target=read, daemon=True)
    with contextlib.redirect_stdout(pipe.stdout):
        with unhindered_outputs():
            for line in LINES:
                print(line)
            reader.start()  # only now: all of that was said without one
        assert sys.stdout is pipe.stdout, "all of it was taken"
    reader.join(HANG_GUARD_S)
    assert b"".join(received).decode().splitlines() == LINES


def test_what_nobody_takes_is_given_up_at_the_end_and_what_is_said_later_too(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "_MAX_VAIN_LOOKS", 2)
    with contextlib.redirect_stdout(pipe.stdout):
        with unhindered_outputs():
            for line in LINES:
                print(line)
        for line in LINES:
            print(line, flush=True)
    said = pipe_content(pipe)
    assert LINES[0] in said
    assert LINES[-1] not in said


def pipe_content(pipe: Pipe) -> str:
    """What it holds now; its writer is still there."""
    os.set_blocking(pipe.reading, False)
    said = b""
    with contextlib.suppress(BlockingIOError):
        while received := os.read(pipe.reading, 65536):
            said += received
    return said.decode()


def test_of_too_much_the_newest_is_kept_and_what_is_left_out_is_said(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "MAX_WAITING_BYTES", 4096)
    reader = Reader(pipe, LINES[-1] + "\n")
    with pipe.spoken_into():
        for line in LINES:
            print(line)
        reader.start()
    at, num_gaps = 0, 0
    for line in filter(None, reader.said().splitlines()):  # an empty one: what was before a gap may have had no end
        if line.endswith(" bytes of output are left out: nothing took them]"):
            left_out, num_gaps = int(line[1:].split()[0]), num_gaps + 1
            while left_out > 0:
                left_out, at = left_out - len(LINES[at]) - 1, at + 1
            assert left_out == 0
        else:
            assert line == LINES[at]
            at += 1
    assert at == len(LINES)
    assert num_gaps > 0


@pytest.mark.parametrize("one_write", [True, False])
def test_a_reader_that_is_only_slower_than_the_writer_gets_all_of_it(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, one_write: bool
) -> None:
    monkeypatch.setattr(outputs, "MAX_WAITING_BYTES", 4096)
    reader = Reader(pipe, LINES[-1] + "\n")
    reader.start()
    monkeypatch.setattr(outputs, "_is_writable", lambda fd: True)  # the reader is there, however late it looks
    with pipe.spoken_into():
        if one_write:
            print("\n".join(LINES))
        for line in [] if one_write else LINES:
            print(line)
    assert reader.said().splitlines() == LINES


def test_of_one_write_that_is_too_much_the_end_is_kept(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MAX_WAITING_BYTES", 4096)
    fill(pipe)
    reader = Reader(pipe, LINES[-1] + "\n")
    with pipe.spoken_into():
        print("the first")
        print("\n".join(LINES))
        reader.start()
    assert reader.said().splitlines()[-60:] == LINES[-60:]
    assert " bytes of output are left out: nothing took them]" in reader.said()


def fill(pipe: Pipe) -> None:
    """So that it takes nothing more."""
    os.set_blocking(pipe.stdout.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe.stdout.fileno(), b"." * 4096)
    os.set_blocking(pipe.stdout.fileno(), True)


def test_a_thread_that_ended_is_not_waited_for(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without memory."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(outputs._Outlet, "_write", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pipe.spoken_into():
        print("lost")
    assert pipe.read_to_the_end() == ""


def test_one_who_goes_on_talking_shortens_nobodys_time(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for at the end is that something is taken, not that something is said."""
    monkeypatch.setattr(outputs, "_LOOK_EVERY_S", HANG_GUARD_S)  # so that no look is ever over
    fill(pipe)
    has_talked = threading.Event()

    def talk(stream: TextIO) -> None:
        for line in LINES:
            print(line, file=stream)
        has_talked.set()

    received: list[str] = []

    def read() -> None:
        has_talked.wait()
        received.append(read_until(pipe, LINES[-1] + "\n"))

    threads = [threading.Thread(target=read, daemon=True)]
    with pipe.spoken_into():
        print("the first")
        threads.append(threading.Thread(target=talk, args=(sys.stdout,), daemon=True))
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert received[0].lstrip(".").splitlines() == ["the first", *LINES]


def test_a_file_on_a_full_disk_is_left_to_whoever_wrote_to_it() -> None:
    with open("/dev/full", "w") as stdout:
        with contextlib.redirect_stdout(stdout):
            with unhindered_outputs():
                print("what does not fit")
            with pytest.raises(OSError, match="No space left"):
                stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # else it fails once more as it is closed


def read_until(pipe: Pipe, last: str) -> str:
    said = b""
    while not said.endswith(last.encode()):
        said += os.read(pipe.reading, 65536)
    return said.decode()


def test_of_a_progress_bar_that_nobody_sees_only_the_newest_frame_waits(pipe: Pipe) -> None:
    reader = Reader(pipe, "the end\n")
    with pipe.spoken_into():
        for line in LINES:
            print(line)
        for i in range(20_000):
            print(f"\r{i} of 20000", end="", flush=True)
        print("\nthe end")
        reader.start()
    said = reader.said()
    assert said.endswith("\r19999 of 20000\nthe end\n")
    assert said.count("\r") == 1
    assert said.split("\r")[0].splitlines() == LINES


def test_of_a_reader_that_left_it_is_told_once(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.redirect_stdout(pipe.stdout):
        with unhindered_outputs():
            os.close(pipe.reading)
            for line in LINES:
                print(line, flush=True)
        print("more", flush=True)
    assert caplog.text.count("the standard output takes nothing any more (Broken pipe)") == 1


def test_a_terminal_that_another_process_made_non_blocking_gets_all_of_it(pipe: Pipe) -> None:
    os.set_blocking(pipe.stdout.fileno(), False)
    reader = Reader(pipe, LINES[-1] + "\n")
    with pipe.spoken_into():
        for line in LINES:
            print(line)
        reader.start()
    assert reader.said().splitlines() == LINES


def test_both_streams_of_one_place_keep_the_order_of_what_they_say(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = open(os.dup(pipe.stdout.fileno()), "w")  # noqa: SIM115 - closed below
    monkeypatch.setattr(sys, "stderr", errors)
    with pipe.spoken_into():
        for i in range(200):
            print(i, file=sys.stderr if i % 2 else sys.stdout)
    errors.close()
    assert pipe.read_to_the_end().split() == [str(i) for i in range(200)]


def test_a_block_within_a_block_changes_nothing(pipe: Pipe) -> None:
    with pipe.spoken_into():
        outer = sys.stdout
        with unhindered_outputs():
            assert sys.stdout is outer
        assert sys.stdout is outer
        print("said")
    assert pipe.read_to_the_end() == "said\n"


def test_a_file_is_written_as_ever(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stdout, contextlib.redirect_stdout(stdout), unhindered_outputs():
        assert sys.stdout is stdout


def test_what_a_forked_process_says_arrives() -> None:
    said = script(
        "import os, sys\n"
        "from ring.outputs import unhindered_outputs\n"
        "with unhindered_outputs():\n"
        "    print('parent')\n"
        "    sys.stdout.flush()\n"
        "    if os.fork() == 0:\n"
        "        print('child')\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    assert sorted(said.split()) == ["child", "parent"]


def test_a_closed_stream_is_nowhere_and_its_number_is_not_given_away() -> None:
    said = script(
        "import os, sys\n"
        "from ring.outputs import open_standard_streams\n"
        "open_standard_streams()\n"
        "print('lost', flush=True)\n"
        "assert sys.stdin.read() == ''\n"
        "assert open('/dev/null').fileno() > 2\n"
        "assert os.get_inheritable(0) and os.get_inheritable(1)\n"
        "print('said', file=sys.stderr)\n",
        closed="<&- >&-",
        of="stderr",
    )
    assert said == "said\n"


def test_streams_that_are_there_are_left_as_they_are() -> None:
    before = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (0, 1, 2)], sys.stdin, sys.stderr
    open_standard_streams()
    assert ([fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (0, 1, 2)], sys.stdin, sys.stderr) == before


def script(code: str, *, closed: str = "", of: str = "stdout") -> str:
    """What it says."""
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said: str = getattr(ended, of)
    return said
