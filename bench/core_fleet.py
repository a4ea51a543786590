"""Many students and replicas of `ring.core` in one process, in virtual time and without I/O, for `bench.bench_core`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from ring.core.actions import Action, Send
from ring.core.config import Expectation, RingConfig, TeacherConfig
from ring.core.messages import FillHeader, Request, TokenRequest, WireDtype
from ring.core.student import StudentMachine
from ring.core.teacher import Put, TeacherAction, TeacherMachine

DEPTH = 8
NUM_TOKENS = 512  # of a microbatch; all of its rows count
ROW_BYTES = 16
FINGERPRINT = "model"
#: Time between two fills of one student.
FILL_INTERVAL_S = 0.1
FOREVER_S = 1e6


def microbatch(seq: int) -> tuple[TokenRequest, Expectation]:
    """What is asked for a seq, and what its fill must look like."""
    input_hash = seq.to_bytes(16, "little")
    payload = TokenRequest(
        token_ids=bytes(4 * NUM_TOKENS),
        doc_lengths=(NUM_TOKENS,),
        row_ranges=((0, NUM_TOKENS),),
        input_hash=input_hash,
    )
    expect = Expectation(
        num_rows=NUM_TOKENS,
        dtype=WireDtype.BF16,
        num_bytes=NUM_TOKENS * ROW_BYTES,
        input_hash=input_hash,
        cost_tokens=NUM_TOKENS,
    )
    return payload, expect


class CoreFleet:
    """Students, each connected to `links` replicas; every replica answers what it was asked, one batch at a time."""

    def __init__(self, *, num_students: int, num_replicas: int, links: int, pings: bool = False) -> None:
        """pings: keep connections alive at the default pace; without, only fills cost anything."""
        self.now_s = 0.0
        self.num_fills = 0
        period_s, timeout_s = (1.0, 5.0) if pings else (FOREVER_S, 2 * FOREVER_S)
        config = RingConfig(
            depth=DEPTH,
            ping_interval_s=period_s,
            peer_timeout_s=timeout_s,
            request_timeout_s=FOREVER_S,
            teacher_timeout_s=FOREVER_S,
        )
        serving = TeacherConfig(
            max_batch_tokens=4 * NUM_TOKENS,
            max_rows=NUM_TOKENS,
            max_tokens=NUM_TOKENS,
            max_students=num_students,
            student_timeout_s=FOREVER_S,
        )
        self._teachers = [TeacherMachine(serving) for _ in range(num_replicas)]
        self.students = [StudentMachine(config, epoch=f"s{i}", now_s=0.0) for i in range(num_students)]
        self._next_seqs = [0] * num_students
        self._interval_s = FILL_INTERVAL_S / num_students
        self._busy: deque[int] = deque()  # replicas with work
        self._is_busy = [False] * num_replicas
        for student, machine in enumerate(self.students):
            for link in range(links):
                replica = (student + link) % num_replicas
                self._teachers[replica].student_joined(
                    f"s{student}", num_slots=config.num_slots, slot_bytes=NUM_TOKENS * ROW_BYTES, row_bytes=ROW_BYTES,
                    now_s=0.0,
                )  # fmt: skip
                machine.replica_up(f"r{replica}", epoch=f"r{replica}", fingerprint=FINGERPRINT, now_s=0.0)
        for student in range(num_students):
            self._submit(student)

    def run(self, num_fills: int) -> float:
        """Let at least so many fills happen; returns the CPU seconds that one took."""
        first, begin_s = self.num_fills, time.process_time()
        while self.num_fills - first < num_fills:
            self._serve(self._busy.popleft())
        return (time.process_time() - begin_s) / (self.num_fills - first)

    def keep_alive(self, seconds: float) -> float:
        """Let that time pass without a fill; returns the CPU seconds that its pings took, a replica and second."""
        num_pings, begin_s, end_s = 0, time.process_time(), self.now_s + seconds
        for machine in self.students:
            now_s = self.now_s
            while (deadline_s := machine.next_deadline_s()) is not None and deadline_s <= end_s:
                now_s = max(now_s, deadline_s)
                for action in machine.on_timer(now_s=now_s):
                    machine.heard(getattr(action, "replica", ""), now_s=now_s)
                    num_pings += 1
        self.now_s = end_s
        return (time.process_time() - begin_s) / max(num_pings, 1)

    def _submit(self, student: int) -> None:
        machine = self.students[student]
        while machine.can_submit:
            seq = self._next_seqs[student]
            self._next_seqs[student] += 1
            payload, expect = microbatch(seq)
            self._carry_out(student, machine.submit(seq, payload, expect, now_s=self.now_s))

    def _carry_out(self, student: int, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                replica = int(action.replica[1:])
                self._teachers[replica].request(f"s{student}", action.request, now_s=self.now_s)
                if not self._is_busy[replica]:
                    self._is_busy[replica] = True
                    self._busy.append(replica)

    def _serve(self, replica: int) -> None:
        teacher = self._teachers[replica]
        self._is_busy[replica] = False
        batch = teacher.next_batch(now_s=self.now_s)
        if batch.work:
            # Once more, for what is asked meanwhile.
            self._is_busy[replica] = True
            self._busy.append(replica)
        for work in batch.work:
            self.now_s += self._interval_s
            for action in teacher.computed([work], now_s=self.now_s):
                self._put(replica, action)

    def _put(self, replica: int, action: TeacherAction) -> None:
        if not isinstance(action, Put):
            return
        request, student = action.request, int(action.student[1:])
        self._teachers[replica].sent(action.student, request.fill, now_s=self.now_s)
        machine = self.students[student]
        header = answer(action.student, f"r{replica}", request)
        arrived = machine.arrived(f"r{replica}", request.fill, header.num_bytes, header, None, now_s=self.now_s)
        self._carry_out(student, arrived)
        while (lease := machine.next_lease(now_s=self.now_s)) is not None:
            self._carry_out(student, machine.release(lease.seq, now_s=self.now_s))
            self.num_fills += 1
        machine.next_deadline_s()
        self._submit(student)


def answer(student_epoch: str, teacher_epoch: str, request: Request) -> FillHeader:
    """The header of the right fill."""
    return FillHeader(
        student_epoch=student_epoch,
        teacher_epoch=teacher_epoch,
        fingerprint=FINGERPRINT,
        fill=request.fill,
        num_rows=NUM_TOKENS,
        dtype=WireDtype.BF16,
        num_bytes=NUM_TOKENS * ROW_BYTES,
        input_hash=request.payload.input_hash,
    )
