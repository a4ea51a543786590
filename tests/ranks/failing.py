"""`python -m tests.ranks.failing FAULT ARGUMENTS`: `student.train`, with a fault in the rank that FAULTY_RANK names.

Each fault is one that a machine can have and that no test can order from it: at a moment of its own choosing something
that the trainer calls fails, on one rank only.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager

import student.parallel.checkpoint as checkpoint
import student.train.lockstep as lockstep
import student.train.loop as loop
from ring.core.errors import ConfigError, LocalProtocolError
from ring.core.messages import TokenRequest
from ring.prefetch import Ring
from student.checkpoint import CheckpointError
from student.data import MicroBatch
from student.metrics import MetricsFile
from student.train.__main__ import main
from student.train.resume import Progress
from student.train.saver import Saver

#: Calls that go well before the one that fails.
NUM_GOOD_CALLS = 5
OUT_OF_MEMORY = RuntimeError("no memory for this\nat all")
#: More than any request that does arrive is waited for.
NUM_VAIN_SLEEPS = 1000


def fail_at(owner: Any, name: str, error: Exception | None, *, after: int = NUM_GOOD_CALLS) -> None:
    """From the call after so many on, `owner.name` raises; None: the process is killed there."""
    act, calls = getattr(owner, name), 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after and error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if calls > after and error is not None:
            raise error
        return act(*arguments, **options)

    setattr(owner, name, failing)


def break_pump() -> None:
    """Requests don't arrive any more, and while this rank makes its turn in vain its pump fails."""
    submit, rings, sleeps = Ring.submit, [], 0

    def losing(ring: Ring, seq: int, request: TokenRequest) -> None:
        if seq < NUM_GOOD_CALLS:
            submit(ring, seq, request)
        else:
            rings.append(ring)

    def sleep(seconds: float) -> None:
        nonlocal sleeps
        sleeps += bool(rings)
        if sleeps == NUM_VAIN_SLEEPS:
            rings[0]._pump._fail(LocalProtocolError("the pump failed"))
        time.sleep(seconds)

    Ring.submit = losing  # type: ignore[method-assign]
    lockstep.time = SimpleNamespace(sleep=sleep)  # type: ignore[assignment]


def break_teacher(place: Callable[[lockstep.SharedBody], nn.Module], error: Exception | None = OUT_OF_MEMORY) -> None:
    """A part of the colocated teacher fails in the midst of a pass, which all ranks make together, and ever after."""
    make = lockstep.SharedBody.__init__

    def failing(body: lockstep.SharedBody, *arguments: Any) -> None:
        make(body, *arguments)
        fail_at(place(body), "forward", error)

    lockstep.SharedBody.__init__ = failing  # type: ignore[method-assign]


def fill_disk(*, after: int, until: int) -> None:
    """While these checkpoints' parts are written, no file may grow beyond 4 KiB: the kernel refuses, as a full disk."""
    write, calls = checkpoint._save, 0
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def filled(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if after < calls <= until:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    checkpoint._save = filled


def fill_disk_and_be_stopped() -> None:
    """For the first checkpoint; and while that is begun, a signal ends the run after the step that it is of."""
    fill_disk(after=0, until=1)
    begin, calls = Saver.save, 0

    def stopped(saver: Saver, now: Progress) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            signal.raise_signal(signal.SIGTERM)
        begin(saver, now)

    Saver.save = stopped  # type: ignore[method-assign]


def stop_in_a_checkpoint() -> None:
    """As if it hung in a write to a file system that does not answer."""
    write = checkpoint._save

    def stopped(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        write(*arguments)

    checkpoint._save = stopped


def tear_last_checkpoint() -> None:
    """The disk loses a part of the newest one, just before the model is exported from it."""
    export = Saver.export

    def torn(saver: Saver, *, step: int) -> None:
        shard = next(saver.files.checkpoints.glob(f"step-{step:08d}/shards/*"))
        shard.write_bytes(shard.read_bytes()[:-1])
        export(saver, step=step)

    Saver.export = torn  # type: ignore[method-assign]


def die_evaluating() -> None:
    """Once the ranks have agreed on a microbatch: the others are about to exchange what they make of it."""

    def dying(student: nn.Module, microbatches: Iterable[MicroBatch], **options: Any) -> None:
        next(iter(microbatches))
        os.kill(os.getpid(), signal.SIGKILL)

    loop.evaluate = dying  # type: ignore[attr-defined, assignment]


FAULTS: dict[str, Callable[[], None]] = {
    "lease": lambda: fail_at(Ring, "next_lease", LocalProtocolError("no lease can be made")),
    "submit": lambda: fail_at(Ring, "submit", ConfigError("it can't be asked for")),
    "pump": break_pump,
    "records": lambda: fail_at(MetricsFile, "sync", CheckpointError("no space left for metrics.jsonl"), after=2),
    "memory": lambda: fail_at(DefaultStager, "stage", RuntimeError("not enough memory: you tried"), after=1),
    "embedding": lambda: break_teacher(lambda shared: shared.body.get_input_embeddings()),
    "layer": lambda: break_teacher(lambda shared: shared.body.layers[0].mlp),
    "norm": lambda: break_teacher(lambda shared: shared.body.norm),
    "death in a layer": lambda: break_teacher(lambda shared: shared.body.layers[0].mlp, None),
    "full": lambda: fill_disk(after=0, until=1),
    "full, and a signal": fill_disk_and_be_stopped,
    "full for good": lambda: fill_disk(after=1, until=sys.maxsize),
    "stopped": stop_in_a_checkpoint,
    "torn": tear_last_checkpoint,
    "evaluation": die_evaluating,
}

if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        FAULTS[fault]()
    sys.exit(main())
