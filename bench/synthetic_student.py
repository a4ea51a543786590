"""A small student whose steps are real: a body, the fused loss over the teacher's states, backward, AdamW.

And the three ways in which its bench runs it: alone on states that are there already, not at all (the teacher alone),
and fed by the ring. Each gives the wall time of a step, and the CPU time behind it: what this thread used, and what the
other threads of the process (the pump, the transport) did.

Shapes: N rows, Hs / Ht hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.processes import TeacherProcess, queued_s
from bench.synthetic_teacher import state_table, synthetic_request
from ring.core.errors import DeadlineExceeded, RemoteProtocolError
from ring.core.messages import TokenRequest
from ring.prefetch import Ring
from student.loss import Head, KDLoss
from student.optim import AdamWSettings, StudentOptimizer

#: Steps that are not measured, so that the ring is in its steady state when they end.
WARMUP_STEPS = 3
LEARNING_RATE = 1e-4
#: How long the ring may take to fill before a round, and how often it is looked at; no part of what is measured.
FILL_TIMEOUT_S = 60.0
FILL_POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Means over the measured steps. `thread_s`: CPU time of the training thread; `others_s`: of the process's other
    threads. `queued_s`: the training thread was ready, and something else had its core: those other threads, or work
    that is not the bench's. `stall_s`: waiting for a fill. `ring_s`: in calls of the ring, `stall_s` aside."""

    wall_s: float
    thread_s: float
    others_s: float
    queued_s: float
    stall_s: float = 0.0
    ring_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """A stretch of the pipeline: the student's steps, and per request what the teacher's fills say of it.

    `teacher_cpu_s`: of the teacher's whole process. `teacher_queued_s`: its computing thread had no core."""

    step: StepTimes
    forward_s: float
    teacher_idle_s: float
    teacher_cpu_s: float
    teacher_queued_s: float
    num_bytes: int


class Clock:
    """Wall and CPU time since it was made."""

    def __init__(self) -> None:
        self._wall_s, self._thread_s, self._process_s = time.perf_counter(), time.thread_time(), time.process_time()
        self._queued_s = queued_s()

    def per_step(self, num_steps: int, *, stall_s: float = 0.0, ring_s: float = 0.0) -> StepTimes:
        thread_s = time.thread_time() - self._thread_s
        return StepTimes(
            wall_s=(time.perf_counter() - self._wall_s) / num_steps,
            thread_s=thread_s / num_steps,
            others_s=(time.process_time() - self._process_s - thread_s) / num_steps,
            queued_s=(queued_s() - self._queued_s) / num_steps,
            stall_s=stall_s / num_steps,
            ring_s=ring_s / num_steps,
        )


class SyntheticStudent:
    """`backward`, then `update`, is one step."""

    def __init__(self, *, rows: int, hidden_size: int, teacher_head: Head) -> None:
        generator = torch.Generator().manual_seed(19)
        vocab_size = teacher_head.weight.shape[0]
        torch.manual_seed(19)
        self._body = nn.Linear(hidden_size, hidden_size)
        self._head = nn.Linear(hidden_size, vocab_size, bias=False)
        self._module = nn.ModuleList([self._body, self._head])
        self._optimizer = StudentOptimizer(self._module, AdamWSettings())
        self._teacher_head = teacher_head
        self._loss = KDLoss(kd_weight=0.9, ce_weight=0.1)
        self._inputs_NH = torch.randn(rows, hidden_size, generator=generator)
        self._labels_N = torch.randint(vocab_size, (rows,), generator=generator)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained."""
        return self._module.parameters()

    def backward(self, states_NH: Tensor) -> None:
        """Loss and gradients; the states are not needed afterwards."""
        out = self._loss(
            self._body(self._inputs_NH).to(torch.bfloat16),
            Head(weight=self._head.weight),
            states_NH,
            self._teacher_head,
            self._labels_N,
            all_rows=True,
        )
        torch.autograd.backward(out.loss)

    def update(self) -> None:
        """One step of AdamW."""
        self._optimizer.step(lr=LEARNING_RATE)
        self._optimizer.zero_grad()


class Feeder:
    """Asks the ring for one request after the other, and hands the student their states."""

    def __init__(self, ring: Ring, requests: Sequence[TokenRequest], *, depth: int) -> None:
        """requests: asked for in turn, over and over."""
        self._ring = ring
        self._requests = requests
        self._depth = depth
        self._seq = 0

    def check(self, vocab_size: int, hidden_size: int) -> None:
        """Ask for one request and compare what comes, so that the bench can't measure a pipe of rubbish.

        Raises RemoteProtocolError: other states than the synthetic teacher's."""
        token_bytes = bytearray(self._next_request().token_ids)
        self._submit()
        lease = self._ring.next_lease()
        expected_NH = state_table(vocab_size, hidden_size)[torch.frombuffer(token_bytes, dtype=torch.int32)]
        same = torch.equal(lease.tensor(), expected_NH)
        lease.release()
        if not same:
            raise RemoteProtocolError(f"{len(expected_NH)} states are not those of the tokens that were asked for")

    def teacher_alone(self, num_requests: int) -> float:
        """Mean time of a forward pass while nothing else happens: a request is asked for when the last is there."""
        total_s = 0.0
        for _ in range(num_requests):
            self._submit()
            lease = self._ring.next_lease()
            total_s += lease.header.forward_s
            lease.release()
        return total_s / num_requests

    def pipeline(self, student: SyntheticStudent, num_steps: int, *, teacher: TeacherProcess) -> PipelineTimes:
        """Steps in the steady state: the ring is full before the first, and requests go on until the last.

        The next request goes out when the backward pass has read the slot, as in the trainer."""
        self._fill()
        for _ in range(WARMUP_STEPS):
            self._step(student)
        before, teacher_before_s = self._ring.stats(), (teacher.cpu_s(), teacher.queued_s())
        clock, ring_s, forward_s = Clock(), 0.0, 0.0
        for _ in range(num_steps):
            step_ring_s, step_forward_s = self._step(student)
            ring_s += step_ring_s
            forward_s += step_forward_s
        after, teacher_after_s = self._ring.stats(), (teacher.cpu_s(), teacher.queued_s())
        stall_s = after.student_stall_s - before.student_stall_s
        times = clock.per_step(num_steps, stall_s=stall_s, ring_s=ring_s - stall_s)
        for _ in range(self._depth):
            self._ring.next_lease().release()
        return PipelineTimes(
            step=times,
            forward_s=forward_s / num_steps,
            teacher_idle_s=(after.machine.teacher_stall_s - before.machine.teacher_stall_s) / num_steps,
            teacher_cpu_s=(teacher_after_s[0] - teacher_before_s[0]) / num_steps,
            teacher_queued_s=(teacher_after_s[1] - teacher_before_s[1]) / num_steps,
            num_bytes=after.machine.bytes_received - before.machine.bytes_received,
        )

    def _step(self, student: SyntheticStudent) -> tuple[float, float]:
        """One step; returns the time spent in calls of the ring, and the teacher's for this request."""
        start_s = time.perf_counter()
        lease = self._ring.next_lease()
        states_NH, forward_s = lease.tensor(), lease.header.forward_s
        ring_s = time.perf_counter() - start_s
        student.backward(states_NH)
        start_s = time.perf_counter()
        lease.release()
        self._submit()
        ring_s += time.perf_counter() - start_s
        student.update()
        return ring_s, forward_s

    def _fill(self) -> None:
        """Ask for as many as the ring holds, and wait until all are there."""
        for _ in range(self._depth):
            self._submit()
        give_up_s = time.monotonic() + FILL_TIMEOUT_S
        while (filled := self._ring.stats().machine.num_filled) < self._depth:
            if time.monotonic() > give_up_s:
                raise DeadlineExceeded(f"{filled} of {self._depth} slots are filled after {FILL_TIMEOUT_S:g} s")
            time.sleep(FILL_POLL_S)

    def _submit(self) -> None:
        self._ring.submit(self._seq, self._next_request())
        self._seq += 1

    def _next_request(self) -> TokenRequest:
        return self._requests[self._seq % len(self._requests)]


def student_alone(student: SyntheticStudent, states: Sequence[Tensor], num_steps: int) -> StepTimes:
    """Steps on states that are there already: as many tensors as the ring has slots, one after the other."""
    clock = Clock()
    for step in range(num_steps):
        student.backward(states[step % len(states)])
        student.update()
    return clock.per_step(num_steps)


def requests_of(rows: int, vocab_size: int, *, num: int) -> list[TokenRequest]:
    """Requests that differ."""
    return [synthetic_request(rows, vocab_size, number=number) for number in range(num)]
