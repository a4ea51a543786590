"""`python -m tests.rdma.idle_student ENDPOINT MODEL`: a ring that has all it asked for when its only teacher dies.

Writes the file `idle` once nothing is in flight. Then waits until its control plane has noticed the teacher's end,
asks for one more fill, and expects to be told that the teacher is lost: exit 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ring.core.errors import TeacherLost
from teacher.load import load_teacher
from tests.rdma.forks import HANG_GUARD_S
from tests.ring import rig
from tests.ring.rig import consume, open_ring, request_of, wait_until


def main(endpoint: str, model_dir: str) -> int:
    torch.set_num_threads(1)
    rig.HANG_GUARD_S = HANG_GUARD_S  # all is emulated here
    model = load_teacher(model_dir, dtype="auto", device="cpu")
    # Its end is seen at its connection, not by its silence.
    with open_ring(model, endpoint, transport="ucx", peer_timeout_s=HANG_GUARD_S, teacher_timeout_s=60.0) as ring:
        consume(ring, model, range(4))
        (replica,) = ring.stats().machine.replicas
        assert (replica.state, replica.in_flight, replica.fills) == ("up", 0, 4)
        Path("idle").touch()
        wait_until(lambda: ring.stats().machine.replicas[0].state != "up", "the end of the teacher")
        ring.submit(4, request_of(4))
        try:
            ring.next_lease(timeout_s=HANG_GUARD_S)
        except TeacherLost as error:
            print(error)
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
