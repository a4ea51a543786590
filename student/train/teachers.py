"""Connecting a trainer to its teacher: replicas elsewhere (disagg) or a model in this process (colocated).

Both give the same thing, an open ring and the teacher's head; nothing behind it knows the layout.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import zmq

from ring.auth import load_keyring
from ring.connection import ChannelOptions, LinkOpener
from ring.control import ControlLink, ZmqLinks
from ring.core.config import MAX_SECONDS, RingConfig
from ring.core.errors import ConfigError, DisaggKDError, TeacherLost
from ring.core.messages import HeadInfo, Hello, Welcome
from ring.endpoints import check_exposure
from ring.head import fetch_head
from ring.local_control import LocalPort, local_pair
from ring.prefetch import Ring
from student.config import TrainConfig
from student.parallel.ranks import Ranks
from transport import registry

if TYPE_CHECKING:
    from student.train.lockstep import Lockstep

logger = logging.getLogger(__name__)

#: How long the beginning of a run waits for the other replicas once one has answered, to see that they are alike: for
#: those that nobody can connect to, and for those that are there and busy.
ABSENT_WAIT_S, SILENT_WAIT_S = 2.0, 15.0
#: A teacher and a trainer in one process can't miss each other: a long step or evaluation is no reason to part.
NEVER_S = MAX_SECONDS


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """An open ring, and the head that turns its states into logits: weight [Vt, Ht], bias [Vt] or None.

    lockstep: of a colocated teacher that is cut over the ranks: it computes only in turns of all of them."""

    ring: Ring
    head: HeadInfo
    weight: torch.Tensor
    bias: torch.Tensor | None
    fingerprint: str
    lockstep: Lockstep | None = None


@contextmanager
def connected(
    config: TrainConfig,
    *,
    token_map_hash: str,
    vocab_size: int,
    max_rows: int,
    max_tokens: int,
    max_document_tokens: int,
    ranks: Ranks,
    fingerprint: str | None,
    columns: Callable[[HeadInfo], tuple[int, int]] | None = None,
) -> Iterator[Teachers]:
    """Connect, open slots of `max_rows` states, fetch the head; closed when the block ends.

    fingerprint: of the teacher that the run began with; None: it begins now, or nobody wrote it down.

    columns: which of the head's this rank wants, first and last + 1; None: all of them.

    max_tokens: of the largest microbatch; max_document_tokens: of the longest document.
    The configuration has passed `check_teachers`. Raises ConfigError: models that don't fit together, a missing
    transport, too little memory. Raises TeacherLost: no replica answers in time."""
    with ExitStack() as stack:
        hello, links, idle_work, cut = (_colocated if config.layout == "colocated" else _disaggregated)(
            config, stack, ranks, token_map_hash, vocab_size
        )
        ring = Ring(
            config=_ring_config(config),
            hello=hello,
            links=links,
            options=ChannelOptions(
                admit=partial(
                    _admit, fingerprint=fingerprint, max_tokens=max_tokens, max_document_tokens=max_document_tokens
                ),
                transport=config.transport,
                crc={"auto": None, "on": True, "off": False}[config.crc],
                bind_host=config.bind_host,
                encrypt=config.auth is not None,
            ),
            poison_released=config.poison_released,
            idle_work=idle_work,
        )
        stack.enter_context(ring)
        welcome = ring.wait_welcome(timeout_s=config.teacher_timeout)
        if fingerprint is None:
            ring.check_models(
                absent_s=min(ABSENT_WAIT_S, config.teacher_timeout), silent_s=min(SILENT_WAIT_S, config.teacher_timeout)
            )
        wire_dtype = welcome.wire_dtypes[0]
        slots_bytes = ring.open(
            max_rows=max_rows, wire_dtype=wire_dtype, max_tokens=max_tokens, max_document_tokens=max_document_tokens
        )
        logger.info(
            "teacher %s (%s): %d slots, %.1f MiB in all, states as %s",
            welcome.model,
            welcome.fingerprint[:16],
            config.ring_depth + config.ring_spares,
            slots_bytes / 2**20,
            wire_dtype.value,
        )
        weight, bias = fetch_head(ring, columns=None if columns is None else columns(welcome.head))
        yield Teachers(
            ring=ring,
            head=welcome.head,
            weight=weight,
            bias=bias,
            fingerprint=welcome.fingerprint,
            lockstep=None if cut is None else cut(),
        )


def check_teachers(config: TrainConfig) -> None:
    """All that can be said of the teachers' flags before anything is loaded.

    Raises ConfigError: no endpoint or model, one that leaves the machine unprotected, no keys, no such transport, too
    many slots."""
    if config.kd_weight == 0:
        return
    _ring_config(config)
    if config.layout == "colocated":
        from teacher.load import check_source

        if len(config.teacher) != 1:
            raise ConfigError(f"--layout colocated takes one --teacher DIR|ID, got {len(config.teacher)}")
        if not config.teacher[0]:
            raise ConfigError("--teacher names nothing; allowed with --layout colocated: DIR|ID")
        check_source(config.teacher[0])
        registry.offered(config.transport, same_process=True)
        return
    if not config.endpoints:
        raise ConfigError(f"--teacher names no replica, got {' '.join(config.teacher)!r}; allowed: tcp://HOST:PORT")
    auth = config.auth is not None
    for endpoint in config.endpoints:
        check_exposure(endpoint, flag="--teacher", auth=auth, insecure=config.insecure)
    if config.bind_host is not None:
        check_exposure(f"tcp://{config.bind_host}:*", flag="--bind-host", auth=auth, insecure=config.insecure)
    if len(set(config.endpoints)) < len(config.endpoints):
        raise ConfigError(f"--teacher names an endpoint twice: {', '.join(config.endpoints)}")
    if config.auth is not None:
        load_keyring(config.auth)
    registry.offered(config.transport)


def check_same_teacher(*, before: object, now: str | None) -> None:
    """Raises ConfigError: a resumed run would go on with another teacher."""
    if before != now:
        raise ConfigError(
            f"--resume: the teacher's fingerprint was {before}, now {now}; allowed: the teacher that the run began with"
        )


def _admit(welcome: Welcome, *, fingerprint: str | None, max_tokens: int, max_document_tokens: int) -> None:
    """Raises ConfigError: it is not the teacher that the run began with, or takes less in a request than a microbatch
    has."""
    if fingerprint is not None:
        check_same_teacher(before=fingerprint, now=welcome.fingerprint)
    if max_tokens > welcome.max_tokens:
        raise ConfigError(
            f"a microbatch has up to {max_tokens} tokens, the teacher takes {welcome.max_tokens} in a request: "
            f"lower --batch-size or --max-length, or raise the teacher's --max-batch-tokens"
        )
    if max_document_tokens > welcome.max_document_tokens:
        raise ConfigError(
            f"the longest document has {max_document_tokens} tokens, the teacher takes "
            f"{welcome.max_document_tokens}: lower --max-length"
        )


def _ring_config(config: TrainConfig) -> RingConfig:
    colocated = config.layout == "colocated"
    peer_timeout_s = NEVER_S if colocated else config.peer_timeout
    return RingConfig(
        depth=config.ring_depth,
        num_spares=config.ring_spares,
        # The teacher in this process answers only while the trainer waits for it: its silence means nothing.
        request_timeout_s=NEVER_S if colocated else config.request_timeout,
        peer_timeout_s=peer_timeout_s,
        ping_interval_s=min(1.0, peer_timeout_s / 4),
        teacher_timeout_s=config.teacher_timeout,
    )


#: Hello, links, idle work, and how the teacher is cut over the ranks once its head was fetched.
Connection = tuple[Hello, list[tuple[str, LinkOpener]], Callable[[], bool] | None, Callable[[], "Lockstep"] | None]


def _hello(config: TrainConfig, ranks: Ranks, token_map_hash: str, vocab_size: int, backends: tuple[str, ...]) -> Hello:
    return Hello(
        run=config.shown_name,
        rank=ranks.rank,
        world_size=ranks.world_size,
        epoch=secrets.token_hex(8),
        token_map_hash=token_map_hash,
        vocab_size=vocab_size,
        host_id=registry.host_id(),
        backends=backends,
    )


def _endpoints_of(rank: int, endpoints: tuple[str, ...], replicas_per_rank: int) -> tuple[str, ...]:
    """The replicas that a rank uses: so many in turn, so that all serve equally many ranks."""
    count = min(replicas_per_rank, len(endpoints)) or len(endpoints)
    return tuple(endpoints[(rank * count + place) % len(endpoints)] for place in range(count))


def _disaggregated(
    config: TrainConfig, stack: ExitStack, ranks: Ranks, token_map_hash: str, vocab_size: int
) -> Connection:
    endpoints = _endpoints_of(ranks.rank, config.endpoints, config.replicas_per_rank)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # After the ring, which the stack closes first: terminating waits for its sockets.
    stack.callback(context.term)
    keyring = None if config.auth is None else load_keyring(config.auth)
    links: list[tuple[str, LinkOpener]] = [(name, ZmqLinks(context, name, keyring=keyring)) for name in endpoints]
    return _hello(config, ranks, token_map_hash, vocab_size, registry.offered(config.transport)), links, None, None


def _colocated(config: TrainConfig, stack: ExitStack, ranks: Ranks, token_map_hash: str, vocab_size: int) -> Connection:
    # Only here: a trainer whose teacher runs elsewhere does not need the teacher's code in memory.
    from teacher.load import load_teacher
    from teacher.service import ServiceConfig, TeacherService

    is_shared = config.fsdp and ranks.are_many
    backends = registry.offered(config.transport, same_process=True)
    model = load_teacher(config.teacher[0], dtype=config.teacher_dtype, device=ranks.device)
    link, port = local_pair()
    service = TeacherService(
        model,
        port,
        ServiceConfig(
            replica=LocalPort.STUDENT,
            backends=backends,
            epoch=secrets.token_hex(8),
            max_batch_tokens=config.max_batch_tokens,
            max_students=1,
            student_timeout_s=NEVER_S,
            # In turns of all ranks a pass must not serve two microbatches of one.
            deterministic=config.deterministic or is_shared,
            raises_failures=True,
        ),
    )
    stack.callback(service.close)
    unopened = [link]

    def open_link() -> ControlLink:
        # A model that failed in this very process will fail again, and its link can't be opened twice.
        if not unopened:
            raise TeacherLost("the teacher in this process ended the session")
        return unopened.pop()

    in_turns = False

    def run_teacher() -> bool:
        try:
            talked = service.io_turn()
            return service.compute_turn() or talked
        except DisaggKDError:
            raise
        except Exception as error:
            raise TeacherLost(f"the teacher in this process failed: {type(error).__name__}: {error}") from error

    def idle_work() -> bool:
        return service.io_turn() if in_turns else run_teacher()

    def cut() -> Lockstep:
        nonlocal in_turns
        from student.train.lockstep import Lockstep, SharedBody

        in_turns = True
        return Lockstep(SharedBody(model.split, ranks), run_teacher)

    hello = _hello(config, ranks, token_map_hash, vocab_size, backends)
    return hello, [(link.name, open_link)], idle_work, cut if is_shared else None
