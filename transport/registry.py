"""Which backends there are, which of them can run here, and which one a channel uses.

A new backend is one module with the functions of `transport.contract.Backend` and one line in `ENTRIES`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ring.core.errors import ConfigError
from transport.contract import Backend
from transport.host import host_id as host_id

logger = logging.getLogger(__name__)

AUTO = "auto"
_RDMA = "+rdma"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One backend. `same_process`: only for a teacher inside the student's process, so `auto` between processes and
    handshakes leave it out. `wants_rdma`: without an RDMA device on both sides `auto` prefers every other one."""

    name: str
    module: str
    same_process: bool = False
    wants_rdma: bool = False


#: Best first.
ENTRIES = (
    Entry(name="local", module="transport.local", same_process=True),
    Entry(name="shm", module="transport.shm"),
    Entry(name="ucx", module="transport.ucx", wants_rdma=True),
    Entry(name="zmq", module="transport.zmq_tcp"),
)

if TYPE_CHECKING:  # the type checker compares each module with the protocol, which `load` can't
    from transport import local, shm, ucx, zmq_tcp

    _checked: tuple[Backend, ...] = (local, shm, ucx, zmq_tcp)


def names(*, same_process: bool = False) -> tuple[str, ...]:
    """The registered backends, best first; with `same_process` those that need one process too."""
    return tuple(entry.name for entry in ENTRIES if same_process or not entry.same_process)


def available(*, same_process: bool = False) -> tuple[str, ...]:
    """Those of `names` that can run here."""
    return tuple(name for name in names(same_process=same_process) if unavailable(name) is None)


def offered(requested: str, *, same_process: bool = False) -> tuple[str, ...]:
    """What a process offers in a handshake when its user asked for this transport, or for `auto`.

    That is names of backends, and `NAME+rdma` for each that has an RDMA device here.
    Raises ConfigError: there is no such backend, it can't run here, or it leads to no other process and has to."""
    if requested == AUTO:
        rdma = {name: _has_rdma_if_it_loads(name) for name in available(same_process=same_process)}
        usable = [name for name, has_rdma in rdma.items() if has_rdma is not None]
        return (*usable, *(f"{name}{_RDMA}" for name in usable if rdma[name]))
    load(requested)
    if _entry(requested).same_process and not same_process:
        allowed = ", ".join((AUTO, *names()))
        raise ConfigError(f"transport {requested!r} stays within one process; between two, allowed: {allowed}")
    return (requested, f"{requested}{_RDMA}") if _has_rdma(requested) else (requested,)


def load(name: str) -> Backend:
    """The backend of that name. Raises ConfigError: there is none, or something it needs is missing."""
    backend = _module(name)
    reason = backend.unavailable()
    if reason is not None:
        raise ConfigError(f"transport {name!r} was asked for and can't run here: {reason}")
    return backend


def unavailable(name: str) -> str | None:
    """None: it can run here; else what is missing and what to install. Raises ConfigError: no such backend."""
    return _module(name).unavailable()


def choose(
    requested: str, *, student_backends: Sequence[str], teacher_backends: Sequence[str], same_host: bool
) -> tuple[str, str]:
    """(backend, why this one) for a channel between two sides that offered these backends.

    Raises ConfigError: the requested one can't be used by both, or `auto` finds none."""
    if requested != AUTO:
        _entry(requested)
        rejection = _why_not(requested, student_backends, teacher_backends, same_host=same_host)
        if rejection is not None:
            raise ConfigError(f"transport {requested!r} was asked for, but {rejection}")
        return requested, "it was asked for"
    rejections: list[str] = []
    last_resort: str | None = None
    for entry in ENTRIES:
        rejection = _why_not(entry.name, student_backends, teacher_backends, same_host=same_host)
        if rejection is None and entry.wants_rdma and not _both_have_rdma(entry, student_backends, teacher_backends):
            last_resort = last_resort or entry.name
            rejection = "there is no RDMA device on both sides that it can use"
        if rejection is None:
            return entry.name, f"auto: the best that both sides can do{''.join(f'; not {r}' for r in rejections)}"
        if not entry.same_process:
            rejections.append(f"{entry.name} ({rejection})")
    if last_resort is not None:
        return last_resort, f"auto: nothing else is left{''.join(f'; not {r}' for r in rejections)}"
    raise ConfigError(f"transport auto found none that both sides can do: not {', not '.join(rejections)}")


def _both_have_rdma(entry: Entry, student_backends: Sequence[str], teacher_backends: Sequence[str]) -> bool:
    return all(f"{entry.name}{_RDMA}" in backends for backends in (student_backends, teacher_backends))


def _why_not(
    name: str, student_backends: Sequence[str], teacher_backends: Sequence[str], *, same_host: bool
) -> str | None:
    for side, backends in (("student", student_backends), ("teacher", teacher_backends)):
        if name not in backends:
            missing_here = unavailable(name)
            hint = f" (here: {missing_here})" if missing_here else ""
            return f"the {side} can't use it: it has {', '.join(backends) or 'none'}{hint}"
    if not same_host and _module(name).capabilities().same_host_only:
        return "the two sides are not on the same host as the same user, or are in different containers"
    return None


def _has_rdma(name: str) -> bool:
    return _entry(name).wants_rdma and _module(name).capabilities().rdma


def _has_rdma_if_it_loads(name: str) -> bool | None:
    """None: what it is built on is there and is broken, which is no reason to do without the other backends."""
    try:
        return _has_rdma(name)
    except ConfigError as error:
        logger.warning("transport %s is left out of auto: %s", name, error)
        return None


def _entry(name: str) -> Entry:
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in ENTRIES)
    usable = ", ".join(available(same_process=True))
    raise ConfigError(f"no transport is called {name!r}; allowed: {AUTO}, {known}; installed: {usable}")


def _module(name: str) -> Backend:
    return cast(Backend, importlib.import_module(_entry(name).module))
