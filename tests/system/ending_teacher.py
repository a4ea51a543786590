"""A teacher with something done to its end: `python -m tests.system.ending_teacher HOW [FLAGS]`.

    raises          its I/O thread ends, once a pass was computed, of what is no Exception and can't be shown
    locked          its I/O thread ends so while it holds the service's lock, which nobody gives back
    wedged          no pass ever ends
    nohup           SIGHUP is ignored by whoever starts it
    import-NUMBER   this signal comes while it imports what it needs
    load-NUMBER     this signal comes while it reads the model

What its watch waits for is short.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from importlib.abc import MetaPathFinder
from typing import Any

MODULE = "teacher.serve"


class Unspeakable(BaseException):
    """Telling of it fails too."""

    def __str__(self) -> str:
        raise MemoryError


def end_talking(*, locked: bool) -> None:
    from teacher.service import TeacherService

    io_turn, hand_over = TeacherService.io_turn, TeacherService._hand_over
    has_computed = threading.Event()

    def noting(service: TeacherService, *arguments: Any) -> None:
        hand_over(service, *arguments)
        has_computed.set()

    def failing(service: TeacherService) -> bool:
        if has_computed.is_set():
            if locked:
                service._lock.acquire()
            raise Unspeakable
        return io_turn(service)

    TeacherService.io_turn = failing  # type: ignore[method-assign]
    TeacherService._hand_over = noting  # type: ignore[method-assign]


def never_compute() -> None:
    from teacher.forward import TeacherModel

    def wedged(*_: Any, **options: Any) -> Any:
        print("wedged", file=sys.stderr, flush=True)
        threading.Event().wait()

    TeacherModel.iter_forward = wedged  # type: ignore[method-assign]


def signal_at_import(number: int) -> None:
    class Finder(MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "teacher.load":
                os.kill(os.getpid(), number)

    sys.modules.pop("teacher.load", None)
    sys.meta_path.insert(0, Finder())


def signal_at_load(number: int) -> None:
    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith("teacher/config.json"):
            os.kill(os.getpid(), number)

    sys.addaudithook(on_event)


def be_impatient() -> None:
    from teacher import threads

    threads.FAILED_TIMEOUT_S = threads.DRAIN_TIMEOUT_S = threads.CLOSE_TIMEOUT_S = 0.5


if __name__ == "__main__":
    how, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = MODULE
    what, _, number = how.partition("-")
    match what:
        case "raises":
            end_talking(locked=False)
        case "locked":
            end_talking(locked=True)
            be_impatient()
        case "wedged":
            never_compute()
            be_impatient()
        case "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        case "import":
            signal_at_import(int(number))
        case "load":
            signal_at_load(int(number))
        case _:
            raise ValueError(how)
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
