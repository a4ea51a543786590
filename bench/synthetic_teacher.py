"""`python -m bench.synthetic_teacher`: a teacher whose forward pass takes as long as it is told, served for real.

Only the body is synthetic: it multiplies matrices for the time asked for, and gives each token the states of a table
that a bench can make again, so that it knows what must arrive. Everything around the body is `teacher.serve`'s own.

Shapes: B rows of a batch, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import zmq
from torch import Tensor

from planner.head_spec import HeadSpec
from planner.input_hash import input_hash
from ring.command import flag, parse, run, set_up_logging
from ring.control import ZmqPort
from ring.core.errors import ConfigError
from ring.core.messages import TokenRequest
from teacher.body import SplitModel
from teacher.fingerprint import head_sha256
from teacher.forward import TeacherModel
from teacher.service import ServiceConfig, TeacherService
from teacher.threads import Ending, run_service
from transport import registry

PROG = "bench.synthetic_teacher"
#: Names the synthetic vocabulary in the handshake; both sides of the bench have it.
TOKEN_MAP_HASH = "synthetic"
#: One product of the forward pass: under a millisecond, so that any time is met closely.
PRODUCT_SHAPE = (64, 512, 512)
_CALIBRATION_PASSES = 9


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Raises ConfigError on construction: a value out of its range."""

    listen: str = flag("tcp://127.0.0.1:*", "where students connect", metavar="TCP")
    transport: str = flag("auto", "how states travel")
    rows: int = flag(1024, "tokens of a request; each of them is a row that counts")
    hidden_size: int = flag(2048, "elements of a state")
    vocab_size: int = flag(2048, "columns of the head")
    forward_s: float = flag(0.1, "CPU seconds of one forward pass", metavar="S")
    debug: bool = flag(False, "log more, and print tracebacks")

    def __post_init__(self) -> None:
        for name in ("rows", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if not 0 <= self.forward_s < 60:
            raise ConfigError(f"--forward-s must be >= 0 and < 60, got {self.forward_s}")


def state_table(num_ids: int, hidden_size: int) -> Tensor:
    """The states [V, H] of every token, bf16; the same in every process."""
    generator = torch.Generator().manual_seed(17)
    return torch.randn(num_ids, hidden_size, generator=generator).to(torch.bfloat16)


def synthetic_request(rows: int, vocab_size: int, *, number: int) -> TokenRequest:
    """One document of `rows` tokens, all of which count; every number gives others."""
    token_ids_S = (torch.arange(rows) * 7 + number) % vocab_size
    token_bytes = token_ids_S.to(torch.int32).numpy().astype("<u4").tobytes()
    ranges = ((0, rows),)
    return TokenRequest(
        token_ids=token_bytes,
        doc_lengths=(rows,),
        row_ranges=ranges,
        input_hash=input_hash(token_bytes, (rows,), ranges),
    )


class SyntheticBody(SplitModel):
    """Stands where a model's body and head do; `num_products` says how long a document of the batch takes.

    `table_VH`: the states of every token; `product`: what the last multiplication gave."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        generator = torch.Generator().manual_seed(18)
        scale = hidden_size**-0.5
        self.class_name = "Synthetic"
        self.weight_VH = (torch.randn(vocab_size, hidden_size, generator=generator) * scale).to(torch.bfloat16)
        self.bias_V = None
        self.num_products = 0
        self.table_VH = state_table(vocab_size, hidden_size)
        rows, inner, columns = PRODUCT_SHAPE
        self._left = torch.rand(rows, inner)
        self._right = torch.rand(inner, columns)
        self.product = torch.zeros(rows, columns)

    @property
    def num_embeddings(self) -> int:
        return len(self.table_VH)

    def states(self, token_ids_BS: Tensor) -> Tensor:
        for _ in range(self.num_products * len(token_ids_BS)):
            torch.mm(self._left, self._right, out=self.product)
        return self.table_VH[token_ids_BS]


def synthetic_model(vocab_size: int, hidden_size: int) -> TeacherModel:
    """The model that `teacher.service` serves."""
    body = SyntheticBody(vocab_size, hidden_size)
    digest = head_sha256(body.weight_VH, None)
    return TeacherModel(
        name="synthetic",
        split=body,
        head_spec=HeadSpec(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            real_vocab=vocab_size,
            has_bias=False,
            logit_softcap=None,
            logit_scale=1.0,
            dtype="bf16",
        ),
        token_map_hash=TOKEN_MAP_HASH,
        fingerprint=f"synthetic-{vocab_size}-{hidden_size}",
        head_sha256=digest,
        max_positions=None,
        num_ids=vocab_size,
    )


def calibrate(model: TeacherModel, request: TokenRequest, forward_s: float) -> float:
    """Set how many products a pass makes so that it takes `forward_s`; returns what it takes then.

    In CPU seconds of this thread, which other processes on the machine hardly change."""
    body = model.split
    assert isinstance(body, SyntheticBody)

    def pass_s(num_products: int) -> float:
        body.num_products = num_products
        times = []
        for _ in range(_CALIBRATION_PASSES):
            start_s = time.thread_time()
            model.forward_requests([request])
            times.append(time.thread_time() - start_s)
        return statistics.median(times)

    pass_s(1)
    bare_s = pass_s(0)
    num_products = 16
    # Twice: the cost of a product is best known at about the number that is needed.
    for _ in range(2):
        product_s = max((pass_s(num_products) - bare_s) / num_products, 1e-9)
        num_products = max(1, round((forward_s - bare_s) / product_s))
    if forward_s <= bare_s:
        num_products = 0
    return pass_s(num_products)


def serve(config: SyntheticConfig) -> None:
    """Serve until SIGTERM. Raises ConfigError: the port or the transport is not to be had."""
    torch.set_num_threads(1)
    backends = registry.available()
    if config.transport != registry.AUTO:
        registry.load(config.transport)
        backends = (config.transport,)
    model = synthetic_model(config.vocab_size, config.hidden_size)
    reached_s = calibrate(model, synthetic_request(config.rows, config.vocab_size, number=0), config.forward_s)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = ZmqPort(context, config.listen)
    try:
        service = TeacherService(
            model,
            port,
            ServiceConfig(
                replica="synthetic",
                backends=backends,
                epoch=secrets.token_hex(8),
                # One request a pass: what a pass takes is what a request takes.
                max_batch_tokens=config.rows,
            ),
        )
        print(f"ready {port.endpoint} forward_s={reached_s:.6f}", flush=True)
        with Ending(PROG) as ending:
            run_service(service, ending)
    finally:
        port.close()
        context.term()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        config = parse(SyntheticConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        set_up_logging(debug=config.debug)
        serve(config)

    return run(command, prog=PROG, debug="--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main())
