"""R4 with a real teacher: it is stopped in the middle of a fill, past its deadline, and wakes up to write on.

The test reads the student's slots from outside, through their descriptors, to see a fill whose beginning is there and
whose end is not. Fills are some 12 MiB, so that there is time to stop their writer.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import WAYS, Inputs, Start
from tests.ports import free_port
from tests.system.processes import HANG_GUARD_S, Student, Teacher, curve
from tests.tiny_models import build_tiny_checkpoint
from transport.memory import POISON_BYTE

pytestmark = pytest.mark.slow

HIDDEN_SIZE, NUM_SAMPLES, SAMPLE_TOKENS, BATCH_SIZE = 4096, 64, 101, 8
#: Of every microbatch: all tokens of a sample but its last have a target.
FILL_BYTES = BATCH_SIZE * (SAMPLE_TOKENS - 1) * HIDDEN_SIZE * 4
POISONED = bytes([POISON_BYTE]) * 64


class SlotWindow:
    """The slots of a student's process, mapped to be read from here."""

    def __init__(self, pid: int) -> None:
        self._slots: dict[int, mmap.mmap] = {}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            name = os.readlink(fd)
            if "memfd:disaggkd-slot-" in name:
                number = int(name.removesuffix(" (deleted)").rpartition("-")[2])
                if number not in self._slots:
                    with fd.open("rb") as memory:
                        self._slots[number] = mmap.mmap(memory.fileno(), 0, prot=mmap.PROT_READ)

    def __len__(self) -> int:
        return len(self._slots)

    def beginning(self, slot: int) -> bytes:
        return self._slots[slot][:64]

    def end(self, slot: int) -> bytes:
        return self._slots[slot][FILL_BYTES - 64 : FILL_BYTES]

    def content(self, slot: int) -> bytes:
        return self._slots[slot][:FILL_BYTES]

    def half_filled(self) -> int | None:
        """A slot that holds the beginning of a fill and not its end; a released slot is poisoned."""
        for slot in self._slots:
            if self.beginning(slot) != POISONED and self.end(slot) == POISONED:
                return slot
        return None

    def whole(self) -> set[int]:
        """The slots that hold a whole fill."""
        return {s for s in self._slots if self.beginning(s) != POISONED and self.end(s) != POISONED}

    def close(self) -> None:
        for memory in self._slots.values():
            memory.close()


@pytest.fixture(scope="module")
def wide(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[object, ...]]:
    """(a teacher with wide states and little else, settings of a trainer with microbatches of one size)."""
    root = tmp_path_factory.mktemp("wide")
    teacher = build_tiny_checkpoint(
        root / "teacher", "qwen3", seed=1, hidden_size=HIDDEN_SIZE, num_hidden_layers=1, intermediate_size=64
    )
    samples = [[(7 * i + 3 * j) % 300 for j in range(SAMPLE_TOKENS)] for i in range(NUM_SAMPLES)]
    (root / "train.jsonl").write_text("".join(json.dumps({"input_ids": sample}) + "\n" for sample in samples))
    settings = ("--data", root / "train.jsonl", "--batch-size", BATCH_SIZE, "--grad-accum", 1, "--max-length", 128)
    return teacher, (*settings, "--poison-released")


def stop_in_the_middle_of_a_fill(teacher: Teacher, student: Student, slots: SlotWindow) -> int:
    """The slot. The student has no other teacher, so it is this one that fills it."""
    deadline_s = time.monotonic() + HANG_GUARD_S
    while True:
        while (slot := slots.half_filled()) is None:
            assert student.poll() is None, student.tail()
            assert time.monotonic() < deadline_s, "no fill was caught in its middle"
        teacher.send(signal.SIGSTOP)
        teacher.until_held()
        if slots.end(slot) == POISONED and slots.beginning(slot) != POISONED:
            return slot
        teacher.send(signal.SIGCONT)


def wake_while_a_batch_is_read(teacher: Teacher, student: Student, slots: SlotWindow) -> None:
    """Just when a fill of the other one is whole: wherever the late write goes, it must not be there."""
    deadline_s = time.monotonic() + HANG_GUARD_S
    before = slots.whole()
    while not (now := slots.whole()) - before:
        before = now
        assert student.poll() is None, student.tail()
        assert time.monotonic() < deadline_s, "no fill became whole"
    teacher.send(signal.SIGCONT)


@pytest.fixture
def window() -> Iterator[Callable[[Student], SlotWindow]]:
    made: list[SlotWindow] = []

    def open_window(student: Student) -> SlotWindow:
        made.append(SlotWindow(student.pid))
        return made[-1]

    yield open_window
    for one in made:
        one.close()


@pytest.fixture
def start_wide(wide: tuple[Path, tuple[object, ...]], start_teacher: Start, start_student: Start) -> Any:
    """(start a teacher at a port, start a student of the ports with depth 1)."""

    def teach(port: str, **options: Any) -> Teacher:
        teacher: Teacher = start_teacher(model=wide[0], port=port, **options)
        return teacher

    def train(ports: list[str], *arguments: object, **options: Any) -> Student:
        endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        student: Student = start_student(
            *(*wide[1], "--teacher", *endpoints, "--ring-depth", 1, "--request-timeout", 4, "--peer-timeout", 60),
            *arguments,
            **options,
        )
        return student

    return teach, train


def knows(student: Student, teacher: Teacher) -> bool:
    """Whether they are connected, as the student sees it."""
    ups, losses = (student.errors.count(f"replica {what}: {teacher.endpoint}") for what in ("up", "lost"))
    return ups > losses


def quiet_curve(wide: tuple[Path, tuple[object, ...]], start_student: Start, num_steps: int) -> list[dict[str, Any]]:
    quiet = start_student(*wide[1], "--teacher", wide[0], "--layout", "colocated", "--steps", num_steps, out="quiet")
    quiet.succeed()
    return curve(quiet.out)


@pytest.mark.parametrize("asleep", ["past its deadline", "until it is given up on"])
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_that_is_stopped_in_the_middle_of_a_fill_and_wakes_up_spoils_no_batch(
    wide: tuple[Path, tuple[object, ...]],
    start_wide: Any,
    start_student: Start,
    window: Callable[[Student], SlotWindow],
    way: str,
    asleep: str,
) -> None:
    teach, train = start_wide
    flags, env = WAYS[way]
    ports = [free_port(), free_port()]
    sleeper = teach(ports[0], env=env)
    student = train(ports, *flags, "--ring-spares", 1, env=env)
    student.until_step(2)
    slots = window(student)
    assert len(slots) == 2
    # Twice: with one spare, the second time there is a slot only if the memory of the first came back.
    for _ in range(2):
        late = stop_in_the_middle_of_a_fill(sleeper, student, slots)
        at_stop, content = student.steps_taken, slots.content(late)
        # Nobody else is there yet, so it is missed; then the other one gets its request, in another slot.
        other = teach(ports[1], env=env)
        student.until_step(at_stop + 3)
        if way == "shm":
            assert slots.content(late) == content, "the slot that it may still write is in quarantine"
        if asleep != "past its deadline":
            student.until(lambda: not knows(student, sleeper), "it is given up on")
        wake_while_a_batch_is_read(sleeper, student, slots)
        if way == "shm":
            student.until(lambda: slots.end(late) != POISONED, "the late write landed, in no live slot")  # noqa: B023
        other.send(signal.SIGKILL)
        other.wait()
        student.until_step(student.steps_taken + 3)  # it serves again
    student.send(signal.SIGTERM)
    assert student.wait() == 128 + signal.SIGTERM, student.tail()
    assert curve(student.out) == quiet_curve(wide, start_student, student.steps_taken)
    assert student.summary["retries"] >= 2


@pytest.mark.parametrize("wakes", [True, False])
def test_without_a_spare_it_waits_for_the_fence_and_ends_with_exit_3_if_none_comes(
    wide: tuple[Path, tuple[object, ...]],
    start_wide: Any,
    start_student: Start,
    window: Callable[[Student], SlotWindow],
    wakes: bool,
) -> None:
    """R4, then R5: the other replica is there all the time, and of no use without a slot."""
    teach, train = start_wide
    ports = [free_port(), free_port()]
    sleeper = teach(ports[0])
    timeout = ("--teacher-timeout", 100 if wakes else 12)
    student = train(ports, "--transport", "shm", "--ring-spares", 0, *timeout)
    student.until_step(2)
    slots = window(student)
    late = stop_in_the_middle_of_a_fill(sleeper, student, slots)
    at_stop, content = student.steps_taken, slots.content(late)
    other = teach(ports[1])
    student.until(lambda: knows(student, other), "the other one is there")
    if wakes:
        student.until(lambda: not knows(student, sleeper), "it is given up on")
        assert slots.content(late) == content
        assert student.steps_taken <= at_stop + 1, "the step under way at most"
        sleeper.send(signal.SIGCONT)
        student.until_step(at_stop + 5)
        student.send(signal.SIGTERM)
        assert student.wait() == 128 + signal.SIGTERM, student.tail()
    else:
        assert student.wait() == 3, student.tail()
        assert slots.content(late) == content
        assert f"1 of 1 slots may still be written by {sleeper.endpoint}" in student.errors
        assert student.checkpoints == [f"step-{student.steps_taken:08d}"]
        sleeper.send(signal.SIGCONT)
        student = train(ports, "--transport", "shm", "--resume")
        student.until_step(at_stop + 5)
        student.send(signal.SIGTERM)
        assert student.wait() == 128 + signal.SIGTERM, student.tail()
    assert curve(student.out) == quiet_curve(wide, start_student, student.steps_taken)
