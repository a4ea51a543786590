"""`python -m tests.ranks.stopping_teacher NUM_PASSES NUM_STUDENTS FLAGS`: `teacher.serve` that stops (SIGSTOP) while it
holds a request of each of so many students, once it has run so many forward passes. It goes on with SIGCONT.

Until each of them has asked it computes nothing, so that the moment comes whichever side is the faster one.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ring.core.teacher import TeacherMachine
from teacher.serve import main
from teacher.service import TeacherService


def install(num_passes: int, num_students: int) -> None:
    request, compute_turn = TeacherMachine.request, TeacherService.compute_turn
    askers: set[str] = set()
    passes = 0
    has_stopped = False

    def noting(machine: TeacherMachine, student: str, asked: Any, **options: Any) -> Any:
        if passes >= num_passes:
            askers.add(student)
        return request(machine, student, asked, **options)

    def stopping(service: TeacherService) -> bool:
        nonlocal passes, has_stopped
        if passes == num_passes and not has_stopped:
            if len(askers) < num_students:
                return False
            has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        worked = compute_turn(service)
        passes += worked
        return worked

    TeacherMachine.request = noting  # type: ignore[method-assign]
    TeacherService.compute_turn = stopping  # type: ignore[method-assign]


if __name__ == "__main__":
    install(int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
