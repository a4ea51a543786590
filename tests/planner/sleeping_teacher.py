"""`python -m tests.planner.sleeping_teacher FORWARD_S ROWS HIDDEN VOCABULARY`: a served teacher whose pass is a sleep.

Sleeping takes no processor, so that a pipeline of sleeps keeps its times on a busy machine; the service, the ring and
the transport around it are the real ones.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import zmq
from torch import Tensor

from bench.synthetic_teacher import SyntheticBody, synthetic_model
from ring.control import ZmqPort
from teacher.service import ServiceConfig, TeacherService
from teacher.threads import Ending, run_service
from transport import registry


class SleepingBody(SyntheticBody):
    """States of a table, after a while."""

    forward_s = 0.0

    def states(self, token_ids_BS: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        return self.table_VH[token_ids_BS]


def main(argv: Sequence[str]) -> int:
    forward_s, (rows, hidden_size, vocab_size) = float(argv[0]), map(int, argv[1:])
    torch.set_num_threads(1)
    body = SleepingBody(vocab_size, hidden_size)
    body.forward_s = forward_s
    model = replace(synthetic_model(vocab_size, hidden_size), split=body)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = ZmqPort(context, "tcp://127.0.0.1:*")
    service = TeacherService(
        model,
        port,
        ServiceConfig(
            replica="sleeping",
            backends=registry.available(),
            epoch=secrets.token_hex(8),
            # One request a pass: what a pass takes is what a request takes.
            max_batch_tokens=rows,
        ),
    )
    print(f"ready {port.endpoint}", flush=True)
    with Ending("sleeping_teacher") as ending:
        run_service(service, ending)
    context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
