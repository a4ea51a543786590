"""What processes hold and what they leave, as the kernel tells it: descriptors, threads, slots, ports, socket files."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

_TCP_LISTEN = "0A"


def held(pid: int) -> Counter[str]:
    """How many of each kind of thing the process has. Raises OSError: it is gone."""
    kinds = Counter(_descriptors(pid))
    kinds["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    kinds["mapped slots"] = len(_mapped_slots(pid))
    return kinds


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def slots_of(pid: int) -> set[int]:
    """The inodes of the slots that a process has open or mapped; none where it is gone."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        found = _mapped_slots(pid)
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if "memfd:disaggkd" in os.readlink(fd):
                    found.add(fd.stat().st_ino)
    return found


def owners_of(slots: set[int]) -> set[int]:
    return {pid for pid in _pids() if slots_of(pid) & slots}


def processes_in(directory: Path) -> set[int]:
    """Processes whose working directory it is: the commands that a test started there, and their children."""
    found = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd") == str(directory):
                found.add(pid)
    return found


def listening_ports(pid: int) -> set[int]:
    """TCP ports at which the process listens, in its own network namespace."""
    inodes = {kind[8:-1] for kind in _links(pid) if kind.startswith("socket:[")}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _TCP_LISTEN and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def segments_made_by(pids: Iterable[int]) -> list[int]:
    """System V shared memory that outlived the process that made it."""
    wanted = {str(pid) for pid in pids}
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    names = lines[0].split()
    rows = [dict(zip(names, line.split(), strict=True)) for line in lines[1:]]
    return [int(row["shmid"]) for row in rows if row["cpid"] in wanted]


def rss_bytes(pid: int) -> int:
    """Memory that the process has resident, its slots aside: they are shared, and allocated whole at the start.

    Raises OSError: it is gone."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def _descriptors(pid: int) -> Iterator[str]:
    """What each open descriptor is, without what tells one socket, slot or file of its kind from another."""
    for link in _links(pid):
        name = re.sub(r"posix_[0-9a-f]+|\d+", "", os.path.basename(link))
        if os.path.isdir(link):
            yield "directory"  # of the run, whatever it is called
        else:
            yield name if link.startswith("/") else link.split(":[")[0]


def _links(pid: int) -> Iterator[str]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/{pid}/fd/{fd}")


def _mapped_slots(pid: int) -> set[int]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in maps if "memfd:disaggkd" in line}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
