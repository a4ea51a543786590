"""Carrying out the faults of a scenario: what befalls replicas, students and links, for a time or for good."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.data_plane import Style
from tests.simulation.memory import FINGERPRINT
from tests.simulation.network import Direction
from tests.simulation.scenario import FOREVER_S, Fault, FaultKind

if TYPE_CHECKING:
    from tests.simulation.world import Host, Rank, World


LINK_FAULTS = (
    FaultKind.CUT_LINK,
    FaultKind.CUT_TO_STUDENT,
    FaultKind.CUT_TO_REPLICA,
    FaultKind.FLAKY_LINK,
    FaultKind.UNRELIABLE_ARRIVALS,
)


class Faults:
    """Those of one run. What really happened is counted in `world.met`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clock = world.clock
        self._dice = world.rng("faults")

    def schedule(self) -> None:
        what = self._world.scenario
        for fault in what.faults:
            self._clock.at(fault.at_s, partial(self._apply, fault))
        if what.doom is not None:
            self._clock.at(what.doom_s, self._doom)
            if what.revival_s < FOREVER_S:
                self._clock.at(what.revival_s, self._revive)

    def _apply(self, fault: Fault) -> None:
        host, rank = self._world.hosts[f"r{fault.replica}"], self._world.ranks[fault.student]
        if fault.kind in (FaultKind.CRASH_STUDENT, FaultKind.STOP_STUDENT, FaultKind.SLOW_STUDENT):
            self._trouble_student(fault, rank)
        elif not host.doomed:
            self._trouble_link(fault, host, rank.number)
            self._trouble_replica(fault, host)

    def _note(self, fault: Fault) -> None:
        """It takes effect."""
        self._world.log(str(fault))
        self._world.met[fault.kind.value] += 1

    def _trouble_student(self, fault: Fault, rank: Rank) -> None:
        life = rank.life
        if life is None or not life.alive:
            return
        self._note(fault)
        if fault.kind is FaultKind.CRASH_STUDENT:
            self._world.crash(rank, fault.for_s)
        elif fault.kind is FaultKind.STOP_STUDENT:
            life.stop()
            self._clock.after(fault.for_s, lambda: life.go_on(self._dice))
        else:
            life.trainer.step_factor = 10.0
            self._clock.after(fault.for_s, lambda: setattr(life.trainer, "step_factor", 1.0))

    def _trouble_link(self, fault: Fault, host: Host, rank: int) -> None:
        link, kind = self._world.links[rank, host.name], fault.kind
        if kind in LINK_FAULTS:
            self._note(fault)
        # Shared memory is within one host, which nothing cuts in two.
        cuttable = host.plan.style is not Style.SHM
        if cuttable and kind in (FaultKind.CUT_LINK, FaultKind.CUT_TO_STUDENT):
            self._cut(link.to_student, fault.for_s)
        if cuttable and kind in (FaultKind.CUT_LINK, FaultKind.CUT_TO_REPLICA):
            self._cut(link.to_replica, fault.for_s)
        if kind is FaultKind.FLAKY_LINK:
            for direction in (link.to_replica, link.to_student):
                direction.flaky_frac = 0.3
                self._clock.after(fault.for_s, partial(setattr, direction, "flaky_frac", 0.0))
        if kind is FaultKind.UNRELIABLE_ARRIVALS:
            link.unreliable.frac = 0.2
            self._clock.after(fault.for_s, lambda: setattr(link.unreliable, "frac", 0.0))

    def _cut(self, direction: Direction, for_s: float) -> None:
        direction.num_cuts += 1
        if for_s < FOREVER_S:
            self._clock.after(for_s, direction.heal)

    def _trouble_replica(self, fault: Fault, host: Host) -> None:
        life, kind = host.life, fault.kind
        if life is None or not life.alive or kind in LINK_FAULTS:
            return
        self._note(fault)

        def ends(do: Callable[[], None]) -> None:
            self._clock.after(fault.for_s, lambda: None if host.doomed else do())

        match kind:
            case FaultKind.KILL_REPLICA:
                life.die()
                ends(lambda: self._world.start_replica(host))
            case FaultKind.OTHER_MODEL:
                self._world.restart(host, fingerprint="another model")
                ends(lambda: self._world.restart(host))
            case FaultKind.DRAIN_REPLICA:
                life.deliver(life.drain)
                ends(lambda: self._world.restart(host))
            case FaultKind.STOP_REPLICA:
                life.stop()
                ends(lambda: life.go_on(self._dice))
            case FaultKind.SLOW_REPLICA:
                life.slowness = 20.0
                ends(lambda: setattr(life, "slowness", 1.0))
            case FaultKind.LYING_REPLICA:
                life.lies = True
                ends(lambda: setattr(life, "lies", False))
            case FaultKind.FAILING_REPLICA:
                life.fails = True
                ends(lambda: setattr(life, "fails", False))
            case FaultKind.BREAKING_REPLICA:
                life.breaks = True
                ends(lambda: setattr(life, "breaks", False))

    def _doom(self) -> None:
        kind = self._world.scenario.doom
        assert kind is not None
        self._world.log(f"doom: {kind.value}, for {self._world.scenario.doomed}")
        for i in self._world.scenario.doomed:
            host = self._world.hosts[f"r{i}"]
            if host.life is not None and kind in (FaultKind.LYING_REPLICA, FaultKind.FAILING_REPLICA):
                host.life.go_on(self._dice)
            for rank in range(len(self._world.ranks)):
                fault = Fault(at_s=self._clock.now_s, kind=kind, replica=i, student=rank, for_s=FOREVER_S)
                self._trouble_link(fault, host, rank)
            self._trouble_replica(fault, host)
            host.doomed = True

    def _revive(self) -> None:
        self._world.log("all replicas come back")
        for i, host in enumerate(self._world.hosts.values()):
            host.doomed = False
            if host.life is not None:
                host.life.lies = host.life.fails = False
                host.life.slowness = 1.0
                host.life.go_on(self._dice)
                if host.life.fingerprint != FINGERPRINT:
                    host.life.die()
            self._world.start_replica(host)
            for rank in range(len(self._world.ranks)):
                link = self._world.links[rank, f"r{i}"]
                for direction in (link.to_replica, link.to_student):
                    while direction.num_cuts:
                        direction.heal()
