"""`student.train` that is killed at a moment of its own: `python -m tests.system.dying_student MOMENTS [FLAGS]`.

Moments are separated by commas. Each names something that happens once in a run, so that it is the same one however
often the run was resumed:

    asked:SEQ           the trainer is about to wait in the ring for this microbatch
    trained:SEQ         its backward pass is done; what it added to the gradient is nowhere else
    updated:STEP        the optimizer has made this step; nothing has been written of it
    half-line:STEP      half of the step's line is in metrics.jsonl
    line:STEP           the line is, and nothing else
    disk:STEP:N         the N-th thing that is done to the disk for the checkpoint of this step
    named:STEP          that checkpoint has just got its name
    export:N            the N-th thing that is done to the disk for the final model
    evaluation:STEP     in the midst of the evaluation after this step
    short:STEP          nothing kills it, but the plan hands out no step behind this one

A leading `term-` sends SIGTERM at the moment, instead of SIGKILL; a leading `stop-` SIGSTOP, so that SIGCONT goes on.
With a leading `park-` only the trainer's own thread waits, for SIGUSR1: its ring goes on meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from student.data import MicroBatchPlan, PlannedStep
from student.metrics import MetricsFile
from student.model import DistilledStudent
from student.train.feed import Feed
from student.train.loop import Loop

DISK_EVENTS = ("open", "os.mkdir", "os.rename", "os.chmod")

Strike = Callable[[], None]


def at_microbatch(seq: int, strike: Strike, *, trained: bool) -> None:
    states = Feed.states

    @contextmanager
    def dying(feed: Feed, batch: Any, **options: Any) -> Iterator[Any]:
        if not trained and batch.seq == seq:
            strike()
        with states(feed, batch, **options) as given:
            yield given
            if trained and batch.seq == seq:
                strike()

    Feed.states = dying  # type: ignore[method-assign]


def at_line(step: int, strike: Strike, *, part: float) -> None:
    write = MetricsFile.write

    def dying(file: MetricsFile, record: Any) -> None:
        if getattr(record, "step", None) != step:
            write(file, record)
            return
        if part == 0.5:
            file._file.write(f'{{"step": {step}, "epo')
            file._file.flush()
        elif part == 1:
            write(file, record)
        strike()
        if part == 0:
            write(file, record)

    MetricsFile.write = dying  # type: ignore[method-assign]


def at_disk(text: str, at: int, strike: Strike) -> None:
    """The at-th event whose path holds the text; 0: the first one after that path has been renamed to end with it."""
    seen = 0
    named = False

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen, named
        if event not in DISK_EVENTS:
            return
        if named:
            named = False
            strike()
        if text not in str(arguments[0]):
            return
        seen += 1
        if seen == at:
            strike()
        named = at == 0 and event == "os.rename" and str(arguments[1]).endswith("/" + text)

    sys.addaudithook(on_event)


def at_evaluation(step: int, strike: Strike) -> None:
    evaluate, forward = Loop._evaluate, DistilledStudent.forward
    is_due = False

    def noting(loop: Loop, reporter: Any) -> None:
        nonlocal is_due
        is_due = loop.progress.step == step
        evaluate(loop, reporter)
        is_due = False

    def dying(student: DistilledStudent, *arguments: Any, **options: Any) -> Any:
        out = forward(student, *arguments, **options)
        if is_due and options.get("labels_only"):
            strike()
        return out

    Loop._evaluate = noting  # type: ignore[method-assign]
    DistilledStudent.forward = dying  # type: ignore[method-assign]


def cut_short(step: int) -> None:
    steps = MicroBatchPlan.steps

    def fewer(plan: MicroBatchPlan, position: int = 0) -> Iterator[PlannedStep]:
        return (planned for planned in steps(plan, position) if planned.step <= step)

    MicroBatchPlan.steps = fewer  # type: ignore[method-assign]


def install(moment: str) -> None:
    how, _, what = moment.partition("-") if moment.startswith(("term-", "stop-", "park-")) else ("", "", moment)
    what, *numbers = what.split(":")
    first = int(numbers[0])

    def strike() -> None:
        if how == "park":
            print(f"parked at {what}:{first}", file=sys.stderr, flush=True)
            signal.sigwait({signal.SIGUSR1})
        else:
            os.kill(os.getpid(), {"": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[how])

    match what:
        case "asked" | "trained":
            at_microbatch(first, strike, trained=what == "trained")
        case "updated" | "half-line" | "line":
            at_line(first, strike, part={"updated": 0, "half-line": 0.5, "line": 1}[what])
        case "disk":
            at_disk(f"step-{first:08d}", int(numbers[1]), strike)
        case "named":
            at_disk(f"step-{first:08d}", 0, strike)
        case "export":
            at_disk(".writing-model", first, strike)
        case "evaluation":
            at_evaluation(first, strike)
        case "short":
            cut_short(first)
        case _:
            raise ValueError(moment)


if __name__ == "__main__":
    from student.train.__main__ import main

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for one in sys.argv[1].split(","):
        install(one)
    sys.exit(main(sys.argv[2:]))
