"""The two soft-RoCE devices: what a process is told to use, and the proof that bytes went through them."""

from __future__ import annotations

from pathlib import Path

#: UCX over reliable connections or unreliable datagrams. The first needs the second to connect.
RC, UD = "rc_v,ud_v:aux", "ud_v"
STUDENT, TEACHER = "rxe0:1", "rxe1:1"
#: What soft-RoCE puts into a packet at an MTU of 4500.
MAX_PACKET_BYTES = 4096


def env(tls: str, device: str) -> dict[str, str]:
    return {"UCX_TLS": tls, "UCX_NET_DEVICES": device}


def packets() -> int:
    """Sent by both devices so far."""
    counters = Path("/sys/class/infiniband").glob("rxe*/ports/1/hw_counters/sent_pkts")
    return sum(int(counter.read_text()) for counter in counters)
