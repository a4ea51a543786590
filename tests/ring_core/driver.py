"""A shell for the student's machine without I/O: it carries actions out on a model of the data plane, and checks that
the machine never asks it for what a real data plane would refuse.

The model knows which slot is armed for which fill, which writes the replicas have begun, and which given-up writes may
still land. A replica's behaviour is scripted by the test.
"""

from __future__ import annotations

from dataclasses import replace

from ring.core.actions import (
    Action,
    Arm,
    CancelFill,
    Deliverable,
    Disarm,
    DropReplica,
    Fatal,
    Lease,
    Lost,
    Note,
    Send,
    SendPing,
)
from ring.core.config import Expectation, RingConfig
from ring.core.messages import FillHeader, FillId, RefusalCode, Request, TokenRequest, WireDtype
from ring.core.slots import SlotState
from ring.core.student import StudentMachine

ROW_BYTES = 16
F0 = FillId(0, 0, 0)  # the first fill of seq 0, where the ring starts with it


def microbatch(seq: int, *, num_tokens: int = 10, num_rows: int = 4) -> tuple[TokenRequest, Expectation]:
    """A request and what its fill must look like."""
    input_hash = (seq % 2**64).to_bytes(8, "little")
    payload = TokenRequest(
        token_ids=bytes(4 * num_tokens), doc_lengths=(num_tokens,), row_ranges=((0, num_rows),), input_hash=input_hash
    )
    expect = Expectation(
        num_rows=num_rows,
        dtype=WireDtype.BF16,
        num_bytes=num_rows * ROW_BYTES,
        input_hash=input_hash,
        cost_tokens=num_tokens,
    )
    return payload, expect


class Driver:
    def __init__(self, *, now_s: float = 0.0, **config: int | float) -> None:
        self.now_s = now_s
        self.config = RingConfig(**{"depth": 4, **config})  # type: ignore[arg-type]
        self.machine = StudentMachine(self.config, epoch="student-1", fingerprint="fp", now_s=now_s)
        self.epochs: dict[str, str] = {}  # of the replicas that are connected
        self.num_lives = 0
        self.asked: dict[FillId, tuple[str, Request]] = {}  # sent and not answered, cancelled or not
        self.armed: dict[int, tuple[str, FillId]] = {}  # by slot
        self.begun: set[FillId] = set()  # writes that can't be stopped any more
        self.pending: dict[FillId, str] = {}  # given up while begun: may still land
        self.cancelled: set[FillId] = set()
        self.leases: list[Lease] = []
        self.delivered: list[int] = []
        self.submitted: list[int] = []
        self.log: list[Action] = []
        self.ended: str | None = None

    # ---- carrying actions out ----------------------------------------------------------------------------------

    def do(self, actions: list[Action]) -> list[Action]:
        """Carry actions out, and whatever follows from them; returns all of them."""
        done: list[Action] = []
        todo = list(actions)
        while todo:
            action = todo.pop(0)
            done.append(action)
            todo = [*self._carry_out(action), *todo]
        self.log += done
        self.check()
        return done

    def _carry_out(self, action: Action) -> list[Action]:
        assert self.ended is None or not isinstance(action, Arm | Send | Lost | Fatal), action
        match action:
            case Arm(replica=name, fill=fill, num_bytes=num_bytes):
                assert name in self.epochs
                assert fill.slot not in self.armed
                assert all(late.slot != fill.slot for late in self.pending), "armed over a write that may still land"
                assert 0 <= fill.slot < self.config.num_slots
                assert num_bytes == microbatch(fill.seq)[1].num_bytes
                self.armed[fill.slot] = (name, fill)
            case Send(replica=name, request=request):
                assert self.armed[request.fill.slot] == (name, request.fill), "sent before it was armed"
                assert request.fill not in self.asked
                self.asked[request.fill] = (name, request)
            case Disarm(replica=name, fill=fill, refused=refused):
                assert not (refused and fill in self.begun)
                return self._disarm(name, fill, refused=refused)
            case CancelFill(replica=name, fill=fill):
                assert name in self.epochs
                self.cancelled.add(fill)
            case SendPing(replica=name):
                assert name in self.epochs
            case DropReplica(replica=name):
                self._disconnect(name)
            case Lost(message=message) | Fatal(message=message):
                self.ended = message
            case Deliverable(seq=seq):
                assert self.delivered == self.submitted[: len(self.delivered)]
                assert self.submitted[len(self.delivered)] == seq
            case Note():
                pass
        return []

    def _disarm(self, name: str, fill: FillId, *, refused: bool) -> list[Action]:
        if self.armed.get(fill.slot) == (name, fill):
            del self.armed[fill.slot]
            if fill in self.begun:
                self.pending[fill] = name
        if fill in self.pending and not refused:
            return []
        self.pending.pop(fill, None)
        return self.machine.fenced(fill, now_s=self.now_s)

    def _disconnect(self, name: str) -> None:
        assert self.epochs.pop(name, None) is not None, "a replica was dropped twice"
        # The replica knows nothing of the student any more; what it has begun to write it still may.
        for fill in [fill for fill, (asked, _) in self.asked.items() if asked == name and fill not in self.begun]:
            del self.asked[fill]

    # ---- what replicas and trainer do ----------------------------------------------------------------------------

    def up(self, name: str, *, epoch: str | None = None) -> list[Action]:
        self.num_lives += 1
        self.epochs[name] = epoch or f"{name}-{self.num_lives}"
        return self.do(self.machine.replica_up(name, epoch=self.epochs[name], fingerprint="fp", now_s=self.now_s))

    def down(self, name: str, *, error: str = "connection reset") -> list[Action]:
        """The shell noticed that a replica is gone: it tells the machine, disarms, then closes the channel."""
        actions = self.machine.replica_down(name, error=error, now_s=self.now_s)
        leaving = [a for a in actions if isinstance(a, Disarm) and a.replica == name]
        done = self.do(list(leaving))
        if name in self.epochs:
            self._disconnect(name)
        return done + self.do([a for a in actions if a not in leaving])

    def submit(self, *seqs: int) -> list[Action]:
        done: list[Action] = []
        for seq in seqs:
            actions = self.machine.submit(seq, *microbatch(seq), now_s=self.now_s)
            self.submitted.append(seq)
            done += self.do(actions)
        return done

    def begin(self, fill: FillId) -> None:
        """The replica starts to write: from here on only the end of the write, or of the replica, fences it."""
        assert fill in self.asked
        self.begun.add(fill)

    def header(self, fill: FillId, /, **changes: object) -> FillHeader:
        name, request = self.asked[fill]
        expect = microbatch(fill.seq)[1]
        right = FillHeader(
            student_epoch="student-1",
            teacher_epoch=self.epochs.get(name, "gone"),
            fingerprint="fp",
            fill=fill,
            num_rows=expect.num_rows,
            dtype=expect.dtype,
            num_bytes=expect.num_bytes,
            input_hash=request.payload.input_hash,
            crc=None,
            forward_s=0.25,
            queue_s=0.125,
            idle_s=0.5,
        )
        return replace(right, **changes)  # type: ignore[arg-type]

    def fill(self, fill: FillId, /, *, crc: int | None = None, delivered_bytes: int | None = None) -> list[Action]:
        """The replica's write of `fill` ends, and the data plane reports it if it is still armed."""
        return self.answer(fill, self.header(fill), crc=crc, delivered_bytes=delivered_bytes)

    def answer(
        self, fill: FillId, header: FillHeader, *, crc: int | None = None, delivered_bytes: int | None = None
    ) -> list[Action]:
        """As `fill`, with whatever header."""
        name, _ = self.asked[fill]
        if fill in self.pending:
            return self.land(fill)
        del self.asked[fill]
        self.begun.discard(fill)
        if self.armed.get(fill.slot) != (name, fill):
            return []  # disarmed before it began: the data plane drops it
        del self.armed[fill.slot]
        size = header.num_bytes if delivered_bytes is None else delivered_bytes
        return self.do(self.machine.arrived(name, fill, size, header, crc, now_s=self.now_s))

    def land(self, fill: FillId, *, reported: bool = False) -> list[Action]:
        """A given-up write lands late. That its slot is in quarantine is what keeps the batch whole (R4).

        reported: the data plane reports it as an arrival, as it may where the disarming crossed it."""
        assert self.machine._slots.state(fill.slot) is SlotState.QUARANTINED
        header, name = self.header(fill), self.pending.pop(fill)
        self.begun.discard(fill)
        del self.asked[fill]
        if reported:
            return self.do(self.machine.arrived(name, fill, header.num_bytes, header, None, now_s=self.now_s))
        return self.do(self.machine.fenced(fill, now_s=self.now_s))

    def refuse(self, fill: FillId, code: RefusalCode, message: str = "no") -> list[Action]:
        name, _ = self.asked.pop(fill)
        assert fill not in self.begun
        return self.do(self.machine.refused(name, fill, code, message, now_s=self.now_s))

    def fill_all(self) -> None:
        """Every connected replica answers all that it was asked."""
        while fills := [f for f, (name, _) in self.asked.items() if name in self.epochs and f not in self.pending]:
            self.fill(min(fills))

    def lease(self) -> Lease | None:
        lease = self.machine.next_lease(now_s=self.now_s)
        if lease is not None:
            self.leases.append(lease)
            self.delivered.append(lease.seq)
            assert self.delivered == self.submitted[: len(self.delivered)], "out of order or twice"
        return lease

    def release(self, seq: int) -> list[Action]:
        actions = self.machine.release(seq, now_s=self.now_s)
        self.leases = [lease for lease in self.leases if lease.seq != seq]
        return self.do(actions)

    def consume(self) -> list[int]:
        """Lease and release all that can be delivered now."""
        seqs = []
        while (lease := self.lease()) is not None:
            seqs.append(lease.seq)
            self.release(lease.seq)
        return seqs

    def hear_all(self) -> None:
        for name in self.epochs:
            self.machine.heard(name, now_s=self.now_s)

    def wait(self, seconds: float, *, heard: bool = True) -> list[Action]:
        """Let time pass, calling the timer at exactly each deadline. heard: all connected replicas answer pings."""
        done: list[Action] = []
        end_s = self.now_s + seconds
        while (deadline_s := self.machine.next_deadline_s()) is not None and deadline_s <= end_s:
            self.now_s = max(self.now_s, deadline_s)
            if heard:
                self.hear_all()
            done += self.do(self.machine.on_timer(now_s=self.now_s))
            after_s = self.machine.next_deadline_s()
            assert after_s is None or after_s > self.now_s, "the timer was called and something is still due"
        self.now_s = end_s
        if heard:
            self.hear_all()
        return done

    # ---- what must always hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        stats = self.machine.stats(now_s=self.now_s)
        by_state = (stats.num_free, stats.num_in_flight, stats.num_filled, stats.num_leased, stats.num_quarantined)
        assert sum(by_state) == self.config.num_slots, "slots are conserved"
        assert stats.num_in_flight + stats.num_filled + stats.num_leased <= self.config.depth
        assert stats.num_leased == len(self.leases)
        assert stats.fills - stats.released == stats.num_filled + stats.num_leased
        assert stats.submitted == (
            stats.released + stats.num_leased + stats.num_filled + stats.num_in_flight + stats.waiting + stats.pending
        )
        assert stats.pending <= self.config.pending_limit

    def sends(self, actions: list[Action]) -> list[tuple[str, FillId]]:
        return [(a.replica, a.request.fill) for a in actions if isinstance(a, Send)]


def dropped(actions: list[Action]) -> list[str]:
    return [action.replica for action in actions if isinstance(action, DropReplica)]


def lost(actions: list[Action]) -> list[str]:
    return [action.message for action in actions if isinstance(action, Lost)]


def stalled_ring() -> Driver:
    """Replica a is stalled with seqs 0 and 1 given up and being written; b has them now."""
    ring = Driver(depth=4, num_spares=4, request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    ring.submit(0, 1)
    ring.begin(F0)
    ring.up("b")
    ring.wait(10.0)
    return ring
