"""A teacher that fails: `python -m tests.system.failing_teacher MODULE HOW NUMBER [FLAGS]`.

MODULE is teacher.serve, or student.train where the teacher is in its process. After NUMBER forward passes

    wedged     no pass ever ends any more, while every message is still answered
    raises     every pass raises
    breaks     the session is ended over a request, as over one that breaks the protocol
"""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ring.core.errors import RemoteProtocolError
from teacher.forward import TeacherModel
from teacher.service import TeacherService

num_passes = 0


def install(how: str, last: int) -> None:
    forward, take = TeacherModel.iter_forward, TeacherService._request

    def failing(model: TeacherModel, *arguments: Any, **options: Any) -> Iterator[Any]:
        global num_passes
        if num_passes >= last and how == "wedged":
            threading.Event().wait()
        if num_passes >= last and how == "raises":
            raise RuntimeError("the device is out of memory\nand says so in two lines")
        num_passes += 1
        return forward(model, *arguments, **options)

    def taking(service: TeacherService, *arguments: Any) -> None:
        if num_passes >= last and how == "breaks":
            raise RemoteProtocolError("a request that nobody could have meant")
        take(service, *arguments)

    TeacherModel.iter_forward = failing  # type: ignore[method-assign]
    TeacherService._request = taking  # type: ignore[method-assign]


if __name__ == "__main__":
    module, how, number, *sys.argv[1:] = sys.argv[1:]
    install(how, int(number))
    sys.argv[0] = module
    runpy.run_module(module, run_name="__main__", alter_sys=True)
