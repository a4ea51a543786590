"""The soft-RoCE devices of the virtual machine: what a process is told to use, and the proof that bytes went over them.

vm.sh makes two cables, each with a device at either end, so that two tests may run at a time and neither counts the
other's packets. The proof that a payload went over RDMA: UCX was told of no transport but verbs, so there was no other
way for it; the devices of the cable sent at least as many packets as it takes at the MTU, of which none carries more;
and the cable itself carried at least its bytes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: UCX over reliable connections or unreliable datagrams. The first needs the second to connect.
RC, UD = "rc_v,ud_v:aux", "ud_v"
#: What soft-RoCE puts into a packet at an MTU of 4500.
MAX_PACKET_BYTES = 4096


@dataclass(frozen=True)
class Sent:
    """By both ends of a cable. `packets`: as the RDMA devices count them; `carried_bytes`: as the cable does."""

    packets: int
    carried_bytes: int

    def __sub__(self, before: Sent) -> Sent:
        return Sent(self.packets - before.packets, self.carried_bytes - before.carried_bytes)

    def holds(self, payload_bytes: int) -> bool:
        """Whether a payload of that size can be in it."""
        return self.packets * MAX_PACKET_BYTES >= payload_bytes and self.carried_bytes >= payload_bytes


@dataclass(frozen=True)
class Cable:
    """`student`, `teacher`: the numbers of what is at its ends, rxeN over vN."""

    student: int
    teacher: int

    def student_env(self, tls: str) -> dict[str, str]:
        return {"UCX_TLS": tls, "UCX_NET_DEVICES": f"rxe{self.student}:1"}

    def teacher_env(self, tls: str) -> dict[str, str]:
        return {"UCX_TLS": tls, "UCX_NET_DEVICES": f"rxe{self.teacher}:1"}

    @property
    def exists(self) -> bool:
        return all(Path(f"/sys/class/infiniband/rxe{end}").exists() for end in (self.student, self.teacher))

    def sent(self) -> Sent:
        """So far."""
        ends = (self.student, self.teacher)
        return Sent(
            sum(_count(f"/sys/class/infiniband/rxe{end}/ports/1/hw_counters/sent_pkts") for end in ends),
            sum(_count(f"/sys/class/net/v{end}/statistics/tx_bytes") for end in ends),
        )

    @contextlib.contextmanager
    def disturbed(self, *how: str) -> Iterator[None]:
        """Both directions through netem, which is told how: `loss 1%`, `rate 2mbit`."""
        ends = (f"v{self.student}", f"v{self.teacher}")
        for end in ends:
            subprocess.run(["tc", "qdisc", "add", "dev", end, "root", "netem", "limit", "100000", *how], check=True)
        try:
            yield
        finally:
            for end in ends:
                subprocess.run(["tc", "qdisc", "del", "dev", end, "root"], check=True)

    def waiting_bytes(self) -> int:
        """Sent by the teacher's end and not yet at the student's, while the cable is disturbed."""
        command = ["tc", "-s", "-j", "qdisc", "show", "dev", f"v{self.teacher}"]
        listing = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return sum(int(discipline["backlog"]) for discipline in listing)


def _count(path: str) -> int:
    return int(Path(path).read_text())


#: One for the contract's suite, one for whole runs.
CONTRACT, RUNS = Cable(student=0, teacher=1), Cable(student=2, teacher=3)
