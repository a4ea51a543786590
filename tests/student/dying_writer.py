"""Writes checkpoints in forked children, each killed at another moment, and tells what the disk holds afterwards.

`python -m tests.student.dying_writer ROOT` prints a JSON line for each moment. A moment is one thing that the child
does to the disk: opening, renaming, removing, syncing (Python's audit events say when), or a byte that it writes (the
kernel kills a process whose file grows over its limit). With the machine's power gone at the same moment, files that
were not synced yet come out empty. Run apart from pytest, whose threads don't survive a fork.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from student.checkpoint import TrainState, latest_checkpoint, recover_checkpoints, write_checkpoint
from student.checkpoint import export_model as export
from student.durable import recover
from student.load import load_student
from student.rng import capture_rng
from tests.tiny_models import tiny_model

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")
#: Where within a file the kernel strikes: in every file that is written, since each grows past the small ones.
LIMITS_BYTES = (0, 1, 100, 3000, 20_000, 60_000, 100_000)


def write(root: Path, step: int, *, seed: int) -> None:
    state = TrainState(step=step, position=10 * step, config_hash="c", rng=(capture_rng(),))
    tensors = {"exp_avg.x": torch.full((3,), float(seed))}
    write_checkpoint(root, state, model=tiny_model(seed=seed), optimizer_tensors=tensors, keep=2)


def export_model(root: Path, *, seed: int) -> None:
    export(root / "final", model=tiny_model(seed=seed), tokenizer=None)


@dataclass(frozen=True)
class Job:
    """`before` makes what is there, `act` is what gets killed, `look` says which of the two models is found then."""

    before: Callable[[Path], None]
    act: Callable[[Path], None]
    look: Callable[[Path], object]


def look_at_checkpoints(root: Path) -> object:
    recover_checkpoints(root)
    found, skipped = latest_checkpoint(root)
    seed = None if found is None else int(found.optimizer_tensors()["exp_avg.x"][0])
    names = sorted(entry.name for entry in root.iterdir())
    return {"seed": seed, "skipped": [entry.reason for entry in skipped], "names": names}


def look_at_export(root: Path) -> object:
    recover(root, "final")
    head = load_student(str(root / "final")).model.lm_head.weight
    seeds = [seed for seed in (1, 2) if torch.equal(head, tiny_model(seed=seed).lm_head.weight)]
    names = sorted(entry.name for entry in root.iterdir())
    return {"seed": seeds[0] if seeds else None, "skipped": [], "names": names}


def two_checkpoints(root: Path) -> None:
    write(root, 10, seed=9)
    write(root, 20, seed=1)


JOBS = {
    # The third one pushes the first one out.
    "next": Job(two_checkpoints, lambda root: write(root, 30, seed=2), look_at_checkpoints),
    "same": Job(two_checkpoints, lambda root: write(root, 20, seed=2), look_at_checkpoints),
    "export": Job(lambda r: export_model(r, seed=1), lambda root: export_model(root, seed=2), look_at_export),
}


class Death:
    """Installed in a child: kills it at its `at`-th event; with `power_cut` unsynced files lose what they hold."""

    def __init__(self, root: Path, *, at: int, power_cut: bool) -> None:
        self._root, self._at, self._power_cut = root, at, power_cut
        self._synced: set[int] = {path.stat().st_ino for path in root.rglob("*")}
        self._num_events = 0
        self._fsync = os.fsync
        os.fsync = self._note_sync
        sys.addaudithook(self._on_event)

    def _note_sync(self, descriptor: int) -> None:
        self._count("os.fsync")
        self._fsync(descriptor)
        self._synced.add(os.fstat(descriptor).st_ino)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and (event != "open" or str(arguments[0]).startswith(str(self._root))):
            self._count(event)

    def _count(self, event: str) -> None:
        self._num_events += 1
        if self._num_events != self._at:
            return
        self._at = 0  # what follows is not the child's doing
        if self._power_cut:
            for path in self._root.rglob("*"):
                if path.is_file() and path.stat().st_ino not in self._synced:
                    os.truncate(path, 0)
        os.kill(os.getpid(), signal.SIGKILL)


def limit_files(num_bytes: int) -> None:
    """The write that would grow a file past it kills the process, after what fits."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def deaths(job: Job, template: Path, root: Path) -> Iterator[dict[str, Any]]:
    def die(moment: str, prepare: Callable[[], object]) -> dict[str, Any] | None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        child = os.fork()
        if child == 0:
            prepare()
            job.act(root)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return None if code == 0 else {"moment": moment, "code": code, "found": job.look(root)}

    for how, power_cut in (("killed", False), ("power cut", True)):
        for at in itertools.count(1):
            death = die(f"{how} at event {at}", partial(Death, root, at=at, power_cut=power_cut))
            if death is None:
                break
            yield death
    for num_bytes in LIMITS_BYTES:
        if death := die(f"killed at byte {num_bytes} of a file", partial(limit_files, num_bytes)):
            yield death


def main(root: Path) -> None:
    for name, job in JOBS.items():
        template = root / name / "template"
        template.mkdir(parents=True)
        job.before(template)
        for death in deaths(job, template, root / name / "work"):
            print(json.dumps({"job": name} | death), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
