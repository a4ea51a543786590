"""`python -m tests.ranks.former_teacher FLAGS`: `teacher.serve` that takes a rank that came back for the one before it.

Whatever a rank of a run asks, it answers to the first life of that rank: a fill of the former generation, right in all
else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ring.core.messages import FillHeader
from teacher import service
from teacher.serve import main

first_epochs: dict[tuple[str, int], str] = {}


def install() -> None:
    put, make_header = service.TeacherService._put, service.fill_header
    asking: list[Any] = []

    @contextmanager
    def answering(student: Any) -> Iterator[None]:
        asking.append(student.hello)
        yield
        asking.pop()

    def put_to(teacher: service.TeacherService, what: Any, parts: Any, student: Any, now_s: float) -> None:
        with answering(student):
            put(teacher, what, parts, student, now_s)

    def header_of(*arguments: Any, student_epoch: str, **options: Any) -> FillHeader:
        rank = (asking[-1].run, asking[-1].rank)
        header = make_header(*arguments, student_epoch=student_epoch, **options)
        return replace(header, student_epoch=first_epochs.setdefault(rank, student_epoch))

    service.TeacherService._put = put_to  # type: ignore[method-assign]
    service.fill_header = header_of


if __name__ == "__main__":
    install()
    sys.exit(main())
