"""`disaggkd doctor`: what the transports find on this machine, and what to do about what is bad.

One line a fact: good, worth knowing, or bad, each bad one with its remedy. At the end every transport that can run here
moves fills over loopback for about a second each, between two processes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.report import console
from bench.transport_teacher import HANG_TIMEOUT_S, Open, Put, Teacher, teacher
from ring.command import flag, parse, run
from ring.core.errors import ConfigError, DisaggKDError
from ring.core.messages import FillId
from transport import registry, ucx_core, ucx_library
from transport.contract import Receiver, wait_readable
from transport.devices import INFINIBAND, rdma_devices
from transport.memory import SlotArena

PROG = "disaggkd doctor"
GOOD, INFO, BAD = "good", "info", "bad"
_STYLES = {GOOD: "green", INFO: "dim", BAD: "bold red"}
#: A slot of a usual size, and what of it may be locked at least.
_SLOT_BYTES, _DEPTH = 4 << 20, 4
_MEMLOCK_BYTES = 1 << 30
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Raises ConfigError on construction: a value out of its range."""

    seconds: float = flag(1.0, "about how long each transport is measured; 0: not at all", metavar="S")
    json: bool = flag(False, "print JSON instead of a table")
    debug: bool = flag(False, "print tracebacks")

    def __post_init__(self) -> None:
        if not 0 <= self.seconds <= 60:
            raise ConfigError(f"--seconds must be 0 to 60, got {self.seconds}")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`verdict`: good, info or bad. `remedy`: what to do; empty unless it is bad, or could be better."""

    about: str
    found: str
    verdict: str
    remedy: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if something is bad, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0

    def command() -> None:
        nonlocal code
        config = parse(DoctorConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        findings = [*examine(), *measure(config.seconds)]
        if config.json:
            print(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            print_findings(console(), findings)
        code = int(any(finding.verdict == BAD for finding in findings))

    return run(command, prog=PROG, debug="--debug" in arguments) or code


def print_findings(out: Console, findings: Sequence[Finding]) -> None:
    table = Table(title="what the transports find here", title_justify="left", title_style="bold")
    for name in ("", "found", "verdict", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        # What was found and what to do are anybody's text: a bracket in them is a bracket.
        table.add_row(Text(finding.about), Text(finding.found), verdict, Text(finding.remedy))
    out.print(table)


def examine() -> Iterator[Finding]:
    """Everything but the speed."""
    for name in registry.names():
        reason = registry.unavailable(name)
        # What is missing is an extra: nothing is wrong without it.
        yield Finding(
            about=f"transport {name}",
            found="can run" if reason is None else "can't run",
            verdict=GOOD if reason is None else INFO,
            remedy=reason or "",
        )
    yield from _ucx()
    yield from _rdma()
    yield _memlock()
    yield _shared_memory()


def _ucx() -> Iterator[Finding]:
    if ucx_library.missing() is not None:
        return
    try:
        version, transports = ucx_core.version(), ucx_core.context().transports
    except DisaggKDError as error:
        yield Finding(about="UCX", found="can't be loaded", verdict=BAD, remedy=str(error))
        return
    yield Finding(about="UCX", found=f"version {version}, {ucx_library.path()}", verdict=GOOD)
    yield Finding(about="UCX transports", found=", ".join(transports), verdict=INFO)
    has_verbs, has_cuda = ucx_library.has_module("ib"), ucx_library.has_module("cuda")
    needs_verbs = bool(rdma_devices()) and not has_verbs
    yield Finding(
        about="UCX with verbs",
        found="compiled in" if has_verbs else "not compiled in",
        verdict=BAD if needs_verbs else GOOD if has_verbs else INFO,
        remedy=""
        if has_verbs
        else "for RDMA use a UCX with verbs (HPC-X, conda's ucx, the distribution's): set "
        f"{ucx_library.LIBRARY_VARIABLE}=/path/to/libucp.so.0",
    )
    yield Finding(about="UCX with CUDA", found="compiled in" if has_cuda else "not compiled in", verdict=INFO)
    for variable in sorted(name for name in os.environ if name.startswith("UCX_")):
        yield Finding(about=variable, found=os.environ[variable], verdict=INFO)


def _rdma() -> Iterator[Finding]:
    devices = sorted(path.name for path in INFINIBAND.glob("*")) if INFINIBAND.is_dir() else []
    if not devices:
        yield Finding(about="RDMA devices", found="none", verdict=INFO, remedy="tcp is used between hosts")
        return
    active = rdma_devices()
    for device in devices:
        ports = [port for port in active if port.split(":")[0] == device]
        yield Finding(
            about=f"RDMA device {device}",
            found=f"active ports: {', '.join(ports)}" if ports else "no active port",
            verdict=GOOD if ports else BAD,
            remedy="" if ports else f"check cable and link: rdma link show, ibstat {device}",
        )
    index = os.environ.get("UCX_IB_GID_INDEX", "auto")
    for port in active:
        yield _gid(port, index)


def _gid(port: str, index: str) -> Finding:
    device, number = port.split(":")
    gids = {}
    for path in sorted((INFINIBAND / device / "ports" / number / "gids").glob("*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            gid = path.read_text().strip()
            if gid != _NO_GID:
                gids[path.name] = gid
    is_good = bool(gids) and (index == "auto" or index in gids)
    return Finding(
        about=f"GID of {port}",
        found=f"index {index} of {', '.join(f'{name}={gid}' for name, gid in gids.items()) or 'none'}",
        verdict=GOOD if is_good else BAD,
        remedy="" if is_good else "RoCE: set UCX_IB_GID_INDEX to an index that has a GID; see show_gids",
    )


def _memlock() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = limit == resource.RLIM_INFINITY
    is_enough = is_unlimited or limit >= _MEMLOCK_BYTES
    # Only RDMA locks memory.
    return Finding(
        about="memlock",
        found="unlimited" if is_unlimited else f"{limit >> 10} KiB",
        verdict=GOOD if is_enough else BAD if rdma_devices() else INFO,
        remedy="" if is_enough else "RDMA registers the slots: ulimit -l unlimited, or memlock in limits.conf",
    )


def _shared_memory() -> Finding:
    reason = registry.unavailable("shm")
    found = f"host id {registry.host_id()[:12]}: processes with the same one share memory"
    return Finding(about="same-host shm", found=found, verdict=GOOD if reason is None else BAD, remedy=reason or "")


def measure(seconds: float) -> Iterator[Finding]:
    """The speed of each transport that can run here, over loopback and between two processes."""
    if seconds == 0:
        return
    torch.set_num_threads(1)
    arena = SlotArena(_DEPTH, _SLOT_BYTES)
    try:
        with teacher(num_sources=_DEPTH, source_bytes=_SLOT_BYTES) as process:
            for name in registry.available():
                try:
                    gb_per_s = _loopback(name, process, arena, seconds)
                except DisaggKDError as error:
                    yield Finding(about=f"loopback {name}", found="failed", verdict=BAD, remedy=str(error))
                else:
                    yield Finding(about=f"loopback {name}", found=f"{gb_per_s:.2f} GB/s", verdict=GOOD)
    finally:
        arena.close()


def _loopback(name: str, process: Teacher, arena: SlotArena, seconds: float) -> float:
    receiver = registry.load(name).open_receiver(arena, bind_host="127.0.0.1")
    try:
        process.start(Open(name, receiver.describe(), arena.num_slots, arena.slot_bytes, channel=name))
        _wait(process, receiver)
        process.result()
        warm_gb_per_s = _fills(name, process, receiver, 2 * _DEPTH)
        num_fills = max(2 * _DEPTH, int(seconds * warm_gb_per_s * 1e9 / _SLOT_BYTES))
        return _fills(name, process, receiver, num_fills)
    finally:
        receiver.close()
        receiver.forget()


def _fills(name: str, process: Teacher, receiver: Receiver, num_fills: int) -> float:
    """GB/s, a slot asked for again as soon as its fill came."""
    process.start(Put(name, num_fills, _SLOT_BYTES))
    begin_s = time.perf_counter()
    num_asked = num_arrived = 0
    while num_arrived < num_fills:
        while num_asked < min(num_fills, num_arrived + _DEPTH):
            receiver.arm(FillId(num_asked, 1, num_asked % _DEPTH), num_bytes=_SLOT_BYTES)
            os.write(process.credits_fd, b"!")
            num_asked += 1
        num_arrived += len(receiver.wait(timeout_s=HANG_TIMEOUT_S))
    wall_s = time.perf_counter() - begin_s
    _wait(process, receiver)
    process.result()
    return num_fills * _SLOT_BYTES / wall_s / 1e9


def _wait(process: Teacher, receiver: Receiver) -> None:
    """Until the other process is done; acknowledgements still have to leave."""
    deadline_s = time.monotonic() + HANG_TIMEOUT_S
    while not process.is_done():
        if not receiver.poll():
            wait_readable(receiver, deadline_s, what="the other process")


if __name__ == "__main__":
    sys.exit(main())
