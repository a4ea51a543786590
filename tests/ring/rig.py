"""A real teacher on threads of this process, and real rings that ask it.

`Teacher` runs a `TeacherService` as `teacher.serve` does: one thread talks, one computes. It can be frozen and thawed
like a stopped process, and it can compute one forward pass at a time. Nothing is mocked but faults of the wire, which
come from `transport.fault`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import zmq

from planner.input_hash import input_hash
from ring.connection import ChannelOptions
from ring.control import ControlLink, ZmqLink, ZmqLinks, ZmqPort
from ring.core.config import RingConfig
from ring.core.messages import Hello, TokenRequest
from ring.local_control import local_pair
from ring.prefetch import Ring
from teacher.forward import TeacherModel
from teacher.service import ServiceConfig, TeacherService
from teacher.threads import talk
from tests.ports import free_port
from tests.tiny_models import TOKENIZER_VOCAB
from transport import registry

#: No step of a test takes a tenth of this; it only ends tests that hang.
HANG_GUARD_S = 60.0
BACKENDS = ("local", "shm", "zmq")


class Teacher:
    """A service on two threads. A context manager; leaving it closes the service, if the test has not."""

    def __init__(
        self, model: TeacherModel, *, backend: str = "shm", listen: str = "tcp://127.0.0.1:*", **config: Any
    ) -> None:
        """backend `local`: no port; the one link to it comes with `links`. config: of ServiceConfig."""
        self._context = zmq.Context() if backend != "local" else None
        self._local: ControlLink | None = None
        if self._context is None:
            self._local, port = local_pair()
        else:
            port = ZmqPort(self._context, listen)
        self.endpoint: str = port.endpoint
        settings = {
            "replica": "rig",
            "backends": (backend,) if backend == "local" else registry.available(),
            "epoch": secrets.token_hex(8),
            "deterministic": True,
        }
        self.service = TeacherService(model, port, ServiceConfig(**(settings | config)))
        self._frozen = threading.Event()
        self._threads: list[threading.Thread] = []
        self._computing = threading.Lock()
        self._passes_allowed = threading.Semaphore(0)
        self._computes_freely = True
        self.failures: list[BaseException] = []
        self.thaw()

    def __enter__(self) -> Teacher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        assert not self.failures, self.failures

    def link(self, context: zmq.Context[zmq.Socket[bytes]]) -> ControlLink:
        """A connection of a ring of this process. Within a process there is one, and it can't be opened again."""
        return self._local or ZmqLink(context, self.endpoint)

    def freeze(self) -> None:
        """Neither talk nor compute from now on, as under SIGSTOP; sockets stay open."""
        self._frozen.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def thaw(self) -> None:
        self._frozen = threading.Event()
        for work in (talk, self._compute):
            self._threads.append(threading.Thread(target=self._run, args=(work, self._frozen), daemon=True))
            self._threads[-1].start()

    def hold_passes(self) -> None:
        """Compute no forward pass until `allow_passes`."""
        with self._computing:
            self._computes_freely = False

    def allow_passes(self, count: int | None = None) -> None:
        """So many more; None: as many as there are."""
        if count is None:
            self._computes_freely = True
        self._passes_allowed.release(count or 1)

    def drain(self) -> None:
        """As teacher.serve does on SIGTERM: finish what is held, then go."""
        self.service.drain()
        wait_until(lambda: self.service.drained, "the teacher to finish what it holds")
        self.close()

    def close(self) -> None:
        """Say goodbye and go. Idempotent."""
        if self._threads:
            self.freeze()
        self.service.close()
        if self._context is not None:
            self._context.term()

    def _run(self, work: Callable[[TeacherService, Callable[[], bool]], None], frozen: threading.Event) -> None:
        try:
            work(self.service, frozen.is_set)
        except BaseException as error:  # noqa: BLE001 - the test that owns this teacher raises it
            self.failures.append(error)

    def _compute(self, service: TeacherService, is_frozen: Callable[[], bool]) -> None:
        while not is_frozen():
            with self._computing:
                computed = (self._computes_freely or self._passes_allowed.acquire(blocking=False)) and (
                    service.compute_turn() or self._give_pass_back()
                )
            if not computed:
                service.wait_for_work(timeout_s=0.02)

    def _give_pass_back(self) -> bool:
        """There was nothing to compute."""
        if not self._computes_freely:
            self._passes_allowed.release()
        return False


@contextlib.contextmanager
def open_ring(model: TeacherModel, *teachers: Teacher | str, max_rows: int = 64, **settings: Any) -> Iterator[Ring]:
    """A ring to these teachers, opened for `max_rows` states in the model's own dtype. Settings: as of `make_ring`."""
    with make_ring(model, *teachers, **settings) as ring:
        ring.wait_welcome(timeout_s=HANG_GUARD_S)
        ring.open(max_rows=max_rows, wire_dtype=model.dtype)
        yield ring


@contextlib.contextmanager
def make_ring(
    model: TeacherModel,
    *teachers: Teacher | str,
    transport: str = registry.AUTO,
    crc: bool | None = None,
    poison_released: bool = False,
    idle_work: Callable[[], bool] | None = None,
    hello: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[Ring]:
    """A ring that has begun to look for these teachers, or endpoints. hello, config: fields to change."""
    settings: dict[str, Any] = {"depth": 3, "teacher_timeout_s": HANG_GUARD_S, "peer_timeout_s": 10.0}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = [
        (teacher.endpoint, partial(teacher.link, context))
        if isinstance(teacher, Teacher)
        else (teacher, ZmqLinks(context, teacher))
        for teacher in teachers
    ]
    try:
        with Ring(
            config=RingConfig(**(settings | config)),
            hello=make_hello(model, **(hello or {})),
            links=links,
            options=ChannelOptions(transport=transport, crc=crc),
            poison_released=poison_released,
            idle_work=idle_work,
        ) as ring:
            yield ring
    finally:
        context.term()


def make_hello(model: TeacherModel, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "run": "rig",
        "rank": 0,
        "world_size": 1,
        "epoch": secrets.token_hex(8),
        "token_map_hash": model.token_map_hash,
        "vocab_size": TOKENIZER_VOCAB,
        "host_id": registry.host_id(),
        "backends": registry.available(same_process=True),
    }
    return Hello(**(fields | changes))


def request_of(seq: int) -> TokenRequest:
    """A microbatch that no other seq has: one to three documents, of which some rows count."""
    rng = np.random.default_rng(seq + 1_000_000)
    lengths = tuple(int(n) for n in rng.integers(3, 12, size=1 + seq % 3))
    ids = rng.integers(0, TOKENIZER_VOCAB, size=sum(lengths), dtype=np.uint32).astype("<u4").tobytes()
    ranges, first = [], 0
    for length in lengths:
        ranges.append((first + 1, first + length))
        first += length
    return TokenRequest(
        token_ids=ids,
        doc_lengths=lengths,
        row_ranges=tuple(ranges),
        input_hash=input_hash(ids, lengths, ranges),
    )


def states_of(model: TeacherModel, request: TokenRequest) -> torch.Tensor:
    """What the teacher must send for it, to the bit."""
    (pieces,) = model.forward_requests([request], deterministic=True)
    return torch.cat(pieces)


def consume(ring: Ring, model: TeacherModel, seqs: range, *, hold: int = 1) -> None:
    """Ask for these seqs as far ahead as the ring allows, and check that each comes once, in order and right.

    hold: leases that are kept at a time before the first is released."""
    asked = iter(seqs)
    held = []
    for seq in seqs:
        while ring.can_submit and (ahead := next(asked, None)) is not None:
            ring.submit(ahead, request_of(ahead))
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        assert lease.seq == seq
        assert torch.equal(lease.tensor(), states_of(model, request_of(seq))), f"seq {seq} has other states"
        held.append(lease)
        if len(held) == hold:
            held.pop(0).release()
    for lease in held:
        lease.release()


def set_limits(ring: Ring, *, request_timeout_s: float | None = None, teacher_timeout_s: float | None = None) -> None:
    """Another patience from now on, of an open ring that waits for nothing.

    What has to go well before is given all the time that it takes on a busy machine; only what the test wants to be
    over soon has a short limit."""
    with ring._pump.lock:
        machine = ring._pump.machine
        assert machine is not None
        attempts = machine._attempts
        assert not len(attempts.deadlines)
        given = {"request_timeout_s": request_timeout_s, "teacher_timeout_s": teacher_timeout_s}
        changes = {name: value for name, value in given.items() if value is not None}
        machine._config = attempts._config = dataclasses.replace(machine._config, **changes)
        attempts.deadlines._period_s = attempts.stalls._period_s = machine._config.request_timeout_s
        machine._unserved._timeout_s = machine._config.teacher_timeout_s
        ring._pump.wake()


def make_overdue(ring: Ring) -> None:
    """Every request that is in flight has been so for too long."""
    with ring._pump.lock:
        machine = ring._pump.machine
        assert machine is not None
        overdue = machine._attempts.deadlines._deadline_s
        overdue.update(dict.fromkeys(overdue, time.monotonic()))
        ring._pump.wake()


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def all_up(ring: Ring) -> None:
    """Until every replica of the ring may be asked."""
    wait_until(lambda: all(r.state == "up" for r in ring.stats().machine.replicas), "the replicas to be up")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Poll under the hang guard."""
    deadline_s = time.monotonic() + HANG_GUARD_S
    while not holds():
        assert time.monotonic() < deadline_s, f"waited {HANG_GUARD_S:g} s for {what}"
        time.sleep(0.002)
