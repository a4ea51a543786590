"""What is done to replicas and trainers at random, and undone: a schedule from a seed, on real processes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.ports import free_port
from tests.system.processes import HANG_GUARD_S, Student, Teacher

#: What is done to a replica that works; each is undone some time later.
TO_REPLICAS = ("kill", "stop", "stop, then kill", "ask to leave", "slow down")
ADD, KILL_STUDENT, STOP_STUDENT = "add one", "kill a student", "stop a student"
#: A slowed replica runs in one of so many turns of the loop below.
_SLOW_TURNS = 5
_TURN_S = 0.01


@dataclass
class Place:
    """An address at which the lives of a replica follow each other."""

    start: Callable[..., Teacher]
    port: str = field(default_factory=free_port)
    life: Teacher | None = None
    undo: Callable[[], bool] | None = None  # of what was done to it; False: not yet
    is_slow: bool = False

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def works(self) -> bool:
        return self.life is not None and self.undo is None and self.life.is_ready

    def begin(self) -> bool:
        """A new life, of another epoch, at the old address."""
        if self.life is not None and self.life.poll() is None:
            return False  # it is still leaving
        self.life = self.start(port=self.port, wait=False)
        return True

    def send(self, number: signal.Signals) -> None:
        assert self.life is not None
        self.life.send(number)

    def try_undo(self) -> bool:
        """Whether what was done to it is undone now."""
        if self.undo is not None and self.undo():
            self.undo = None
        return self.undo is None

    def disturb(self, deed: str) -> None:
        match deed:
            case "kill":
                self.send(signal.SIGKILL)
                self.undo = self.begin
            case "stop":
                self.send(signal.SIGSTOP)
                self.undo = self._go_on
            case "stop, then kill":
                self.send(signal.SIGSTOP)
                self.undo = self._kill
            case "ask to leave":
                self.send(signal.SIGTERM)
                self.undo = self._succeed_one_that_left
            case "slow down":
                self.is_slow = True
                self.undo = self._go_on

    def _go_on(self) -> bool:
        self.is_slow = False
        self.send(signal.SIGCONT)
        return True

    def _kill(self) -> bool:
        self.send(signal.SIGKILL)
        assert self.life is not None
        self.life.wait()
        return self.begin()

    def _succeed_one_that_left(self) -> bool:
        assert self.life is not None
        code = self.life.poll()
        if code is not None:
            assert code == 0, f"it was asked to leave:\n{self.life.tail()}"
        return code is not None and self.begin()


@dataclass
class Trainer:
    """A run over all its lives."""

    start: Callable[..., Student]
    seed: int
    name: str
    life: Student
    num_lives: int = 1

    def kill_and_resume(self) -> None:
        self.life.send(signal.SIGKILL)
        self.life.wait()
        self.life = self.start(self.name, self.seed, "--resume")
        self.num_lives += 1

    def go_on(self) -> bool:
        self.life.send(signal.SIGCONT)
        return True


class Disturbance:
    """Carries a schedule out. `deeds`: what was done, in order."""

    def __init__(self, dice: random.Random, places: Sequence[Place], trainers: Sequence[Trainer]) -> None:
        self.deeds: list[str] = []
        self._dice = dice
        self._places = places
        self._trainers = trainers
        self._num_turns = 0
        # (due at this step, or at this time; tries to undo something and says whether it is undone)
        self._undos: list[tuple[int, float, Callable[[], bool]]] = []

    def run(self, num_deeds: int) -> None:
        """So many deeds to replicas, each kind at least once; besides, one is added, and students are killed and
        stopped once each."""
        to_replicas = [*TO_REPLICAS, *self._dice.choices(TO_REPLICAS, k=num_deeds - len(TO_REPLICAS))]
        kinds = [*to_replicas, ADD, KILL_STUDENT, STOP_STUDENT]
        self._dice.shuffle(kinds)
        for kind in kinds:
            self.let_pass(steps=self._dice.randrange(1, 16), patience_s=3.0)
            self._do(kind)
        self.settle()

    def let_pass(self, *, steps: int, patience_s: float) -> None:
        """Until the first trainer took so many more steps; not longer than this, as it may have no teacher."""
        until_step, until_s = self._step + steps, time.monotonic() + patience_s
        while self._step < until_step and time.monotonic() < until_s:
            self._turn()

    def settle(self) -> None:
        """Undo what was done; returns once every replica works."""
        self._undos = [(0, 0.0, undo) for _, _, undo in self._undos]
        deadline_s = time.monotonic() + HANG_GUARD_S
        while self._undos or not all(place.works for place in self._places):
            for place in self._places:
                if place.life is None:
                    place.begin()
            self._turn()
            assert time.monotonic() < deadline_s, f"the replicas don't settle: {self._places}"

    @property
    def _step(self) -> int:
        return self._trainers[0].life.steps_taken

    def _do(self, kind: str) -> None:
        hold = self._step + self._dice.randrange(1, 40), time.monotonic() + self._dice.uniform(0.1, 4.0)
        if kind == KILL_STUDENT:
            self._dice.choice(self._trainers).kill_and_resume()
        elif kind == STOP_STUDENT:
            trainer = self._dice.choice(self._trainers)
            trainer.life.send(signal.SIGSTOP)
            self._undos.append((*hold, trainer.go_on))
        elif kind == ADD:
            [place] = [place for place in self._places if place.life is None]
            place.begin()
        else:
            place = self._one_that_works()
            place.disturb(kind)
            self._undos.append((*hold, place.try_undo))
        self.deeds.append(kind)

    def _one_that_works(self) -> Place:
        deadline_s = time.monotonic() + HANG_GUARD_S
        while not (working := [place for place in self._places if place.works]):
            self._turn()
            assert time.monotonic() < deadline_s, f"no replica comes back: {self._places}"
        return self._dice.choice(working)

    def _turn(self) -> None:
        for trainer in self._trainers:
            assert trainer.life.poll() is None, f"{trainer.name} ended:\n{trainer.life.tail()}"
        self._num_turns += 1
        for place in self._places:
            if place.is_slow:
                place.send(signal.SIGCONT if self._num_turns % _SLOW_TURNS == 0 else signal.SIGSTOP)
        for entry in list(self._undos):
            step, at_s, undo = entry
            if (self._step >= step or time.monotonic() >= at_s) and undo():
                self._undos.remove(entry)
        time.sleep(_TURN_S)
