"""Cores and processes of a bench: each side on its own core, and no teacher left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from bench.processes import TeacherFailed, choose_cores, pinned, queued_s, sigterm_interrupts, teacher_process
from bench.tethered import tethered
from ring.core.errors import ConfigError

#: A hang guard; what is waited for takes a fraction of a second.
GUARD_S = 60


def test_two_different_cpus_are_chosen_from_those_that_may_be_used() -> None:
    cores = choose_cores()
    assert cores.student != cores.teacher
    assert {cores.student, cores.teacher} <= os.sched_getaffinity(0)


def test_one_cpu_is_refused_for_two_sides() -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        with pytest.raises(ConfigError, match=r"needs two CPUs.*found 1"):
            choose_cores()
    finally:
        os.sched_setaffinity(0, cpus)


def test_pinning_holds_for_threads_started_within_and_ends_with_the_block() -> None:
    cpus, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    cpu = max(cpus)
    seen: list[set[int]] = []

    def within() -> None:
        with pinned(cpu):
            thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
            assert torch.get_num_threads() == 1
            raise KeyError

    with pytest.raises(KeyError):
        within()
    assert seen == [{cpu}]
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cpus, num_threads)


def test_time_without_a_core_only_grows() -> None:
    before_s = queued_s()
    sum(range(10**5))
    assert 0 <= before_s <= queued_s()


def test_a_teacher_that_does_not_get_ready_is_said_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(TeacherFailed, match=r"did not get ready.*nowhere.*no such directory"),
        teacher_process(
            "teacher.serve",
            # Without a model it would serve the demo's, where there is one.
            ["--model", str(tmp_path / "nowhere"), "--listen", "tcp://127.0.0.1:*"],
            cpu=choose_cores().teacher,
            log=tmp_path / "log",
        ),
    ):
        pytest.fail("no teacher, no block")


def _wait_for_end(pid_fd: int) -> bool:
    return bool(select.select([pid_fd], [], [], GUARD_S)[0])


def test_a_killed_bench_leaves_no_process_behind() -> None:
    code = (
        "import subprocess, sys; from bench.tethered import tethered\n"
        "child = subprocess.Popen(tethered(['sleep', '600']), stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        # SIGKILL: nothing in the parent can tidy up.
        parent.kill()
        parent.wait()
        assert _wait_for_end(child)
    finally:
        os.close(child)


def test_a_tethered_command_runs_on_its_cpu_under_its_own_process_id() -> None:
    cpu = max(os.sched_getaffinity(0))
    code = "import os; print(os.getpid(), *os.sched_getaffinity(0))"
    process = subprocess.Popen(tethered([sys.executable, "-c", code], cpu=cpu), stdout=subprocess.PIPE, text=True)
    printed, _ = process.communicate(timeout=GUARD_S)
    assert printed.split() == [str(process.pid), str(cpu)]
    assert process.returncode == 0


def test_a_command_whose_parent_is_gone_does_not_start() -> None:
    arguments = [sys.executable, "-m", "bench.tethered", "1", "-", "echo", "started"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=GUARD_S)
    assert (done.returncode, done.stdout) == (143, "")


def test_sigterm_ends_a_bench_through_its_cleanup() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
