"""What a replica sent before its session ended counts; what is wrong with it, or late, is counted (R1, R3)."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from ring.control import ControlLink
from ring.core import codec
from ring.core.actions import SendPing
from ring.core.config import RingConfig
from ring.core.errors import PeerLost
from ring.core.messages import (
    FillHeader,
    Goodbye,
    HeadInfo,
    Hello,
    Message,
    Offer,
    Ready,
    Request,
    TokenRequest,
    Welcome,
    WireDtype,
)
from ring.core.stats import DropCause, RetryCause
from ring.prefetch import Ring
from tests.ring.rig import HANG_GUARD_S, all_up, make_overdue, request_of, wait_until
from transport import registry
from transport.contract import Sender

HIDDEN = 8
HEAD = HeadInfo(
    hidden_size=HIDDEN,
    vocab_size=320,
    real_vocab=320,
    has_bias=False,
    logit_softcap=None,
    logit_scale=1.0,
    dtype=WireDtype.FP32,
    num_bytes=320 * HIDDEN * 4,
    sha256="0",
)


class Script(ControlLink):
    """A replica that runs on the pump's own thread: what it does with a request has been done when the pump looks next.

    answer: called with each request, and with the link."""

    name = "scripted"

    def __init__(self, answer: Callable[[Script, Request], None]) -> None:
        self.inbox: deque[Message] = deque()
        self.asked: list[Request] = []
        self.breaks = False  # the connection, once what was said has been heard
        self.says_nothing = False  # which only who speaks to it finds out
        self.may_open = threading.Event()
        self.may_open.set()
        self.sender: Sender
        self._answer = answer
        self._epoch = ""

    def send(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._epoch = message.epoch
            self.inbox.append(welcome(message))
        elif isinstance(message, Offer):
            threading.Thread(target=self._open, args=(message,)).start()
        elif self.breaks or self.says_nothing:
            raise PeerLost("the connection broke")
        elif isinstance(message, Request):
            self.asked.append(message)
            self._answer(self, message)

    def recv(self) -> Message | None:
        if not self.inbox and self.breaks:
            raise PeerLost("the connection broke")
        return self.inbox.popleft() if self.inbox else None

    def fill(self, request: Request, *, header: bytes | None = None) -> None:
        """Answer it, whole and right but for the header."""
        payload = request.payload
        assert isinstance(payload, TokenRequest)
        num_bytes = payload.num_rows * HIDDEN * 4
        right = FillHeader(
            student_epoch=self._epoch,
            teacher_epoch="t",
            fingerprint="f",
            fill=request.fill,
            num_rows=payload.num_rows,
            dtype=WireDtype.FP32,
            num_bytes=num_bytes,
            input_hash=payload.input_hash,
            crc=None,
            forward_s=0.0,
            queue_s=0.0,
            idle_s=0.0,
        )
        source = torch.full((num_bytes,), request.fill.seq, dtype=torch.uint8)
        encoded = codec.encode_header(right) if header is None else header
        self.sender.put(request.fill, header=encoded, parts=[source])

    def local_host(self) -> str:
        return "127.0.0.1"

    def wait_fds(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        if hasattr(self, "sender"):
            self.sender.close()

    def _open(self, offer: Offer) -> None:
        assert self.may_open.wait(HANG_GUARD_S)
        self.sender = registry.load(offer.backend).open_sender(
            offer.description, num_slots=offer.num_slots, slot_bytes=offer.slot_bytes, timeout_s=HANG_GUARD_S
        )
        self.inbox.append(Ready())


def welcome(hello: Hello) -> Welcome:
    return Welcome(
        replica="scripted",
        epoch="t",
        fingerprint="f",
        model="m",
        head=HEAD,
        token_map_hash=hello.token_map_hash,
        wire_dtypes=(WireDtype.FP32,),
        max_rows=64,
        max_tokens=64,
        max_document_tokens=64,
        host_id=hello.host_id,
        backends=hello.backends,
    )


@contextmanager
def ring_to(backend: str, *replicas: Sequence[Script], depth: int = 2) -> Iterator[Ring]:
    """replicas: the lives of each. One that has no more can't be reached."""

    def opener(lives: Sequence[Script]) -> Callable[[], ControlLink]:
        left = deque(lives)

        def open_link() -> ControlLink:
            if not left:
                raise PeerLost("nobody is there")
            return left.popleft()

        return open_link

    hello = Hello(
        run="rig",
        rank=0,
        world_size=1,
        epoch="s",
        token_map_hash="h",
        vocab_size=320,
        host_id=registry.host_id(),
        backends=(backend,),
    )
    links = [(f"replica {i}", opener(lives)) for i, lives in enumerate(replicas)]
    with Ring(config=RingConfig(depth=depth, teacher_timeout_s=HANG_GUARD_S), hello=hello, links=links) as ring:
        ring.wait_welcome(timeout_s=HANG_GUARD_S)
        ring.open(max_rows=64, wire_dtype=WireDtype.FP32)
        yield ring


def take(ring: Ring, seqs: range) -> None:
    for seq in seqs:
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        assert lease.seq == seq
        assert bool((lease.tensor().view(torch.uint8) == seq).all())
        lease.release()


def is_down(ring: Ring) -> bool:
    return ring.stats().machine.replicas[0].state == "down"


def fill_both_and_say_goodbye(link: Script, request: Request) -> None:
    if len(link.asked) == 2:
        for asked in link.asked:
            link.fill(asked)
        link.inbox.append(Goodbye(reason="closing"))


def fill_both_and_break(link: Script, request: Request) -> None:
    if len(link.asked) == 4:
        for asked in link.asked[:2]:
            link.fill(asked)
        link.breaks = True


def fill_and_break_before_the_next(link: Script, request: Request) -> None:
    """It is noticed by sending, while more is still to be sent."""
    link.fill(request)
    link.breaks = len(link.asked) == 2


@pytest.mark.parametrize("backend", ["local", "shm"])
@pytest.mark.parametrize(
    "answer", [fill_both_and_say_goodbye, fill_both_and_break, fill_and_break_before_the_next], ids=lambda a: a.__name__
)
def test_fills_that_were_whole_before_the_session_ended_are_not_asked_for_again(
    backend: str, answer: Callable[[Script, Request], None]
) -> None:
    link = Script(answer)
    link.may_open.clear()
    with ring_to(backend, [link], depth=4) as ring:
        for seq in range(4):
            ring.submit(seq, request_of(seq))
        link.may_open.set()  # all are asked for at once
        take(ring, range(2))
        wait_until(lambda: is_down(ring), "the end of the session")
        stats = ring.stats().machine
        assert (stats.fills, stats.drops) == (2, 0)
        assert stats.retries == stats.retries_by_cause[RetryCause.DOWN] == 2


def fill_both_and_fall_silent(link: Script, request: Request) -> None:
    if len(link.asked) == 2:
        for asked in link.asked:
            link.fill(asked)
        link.says_nothing = True


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_a_session_that_ends_over_the_first_of_several_fills_loses_none(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to be said meanwhile (here a ping that is due) finds the connection broken."""
    link = Script(fill_both_and_fall_silent)
    decode = codec.decode_header
    with ring_to(backend, [link]) as ring:
        all_up(ring)

        def decode_while_a_ping_is_due(data: bytes | memoryview) -> FillHeader:
            ring._pump._actions.append(SendPing("replica 0"))
            return decode(data)

        monkeypatch.setattr(codec, "decode_header", decode_while_a_ping_is_due)
        for seq in range(2):
            ring.submit(seq, request_of(seq))
        take(ring, range(2))
        wait_until(lambda: is_down(ring), "the end of the session")
        stats = ring.stats().machine
        assert (stats.fills, stats.retries, stats.drops) == (2, 0, 0)


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_nothing_more_is_asked_of_a_replica_whose_session_ends(backend: str) -> None:
    """Its last fills make room for the next requests: they are for the others, and none counts as failed."""
    link = Script(fill_both_and_say_goodbye)
    with ring_to(backend, [link], depth=2) as ring:
        all_up(ring)
        for seq in range(4):
            ring.submit(seq, request_of(seq))
        take(ring, range(2))
        wait_until(lambda: is_down(ring), "the end of the session")
        stats = ring.stats().machine
        assert (stats.fills, stats.retries) == (2, 0)
        assert len(link.asked) == 2


def say_goodbye(link: Script) -> None:
    link.inbox.append(Goodbye(reason="closing"))


def end_the_channel(link: Script) -> None:
    link.sender.close()


@pytest.mark.parametrize("backend", ["local", "shm"])
@pytest.mark.parametrize("end", [say_goodbye, end_the_channel], ids=lambda end: end.__name__)
def test_late_fills_that_come_with_the_end_of_their_session_are_counted_once(
    backend: str, end: Callable[[Script], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ring.session.LAST_WORD_S", 0.0)
    slow, quick = Script(lambda link, request: None), Script(lambda link, request: link.fill(request))
    with ring_to(backend, [slow], [quick], depth=1) as ring:
        all_up(ring)
        ring.submit(0, request_of(0))
        wait_until(lambda: bool(slow.asked or ring.stats().machine.fills), "the request")
        seq = 0
        while not slow.asked:  # whichever is asked first
            take(ring, range(seq, seq + 1))
            seq += 1
            ring.submit(seq, request_of(seq))
            wait_until(lambda: bool(slow.asked or ring.stats().machine.fills > seq), "the request")  # noqa: B023
        make_overdue(ring)
        take(ring, range(seq, seq + 1))
        with ring._pump.lock:
            for request in slow.asked:
                slow.fill(request)
            end(slow)
        wait_until(lambda: ring._pump.replicas["replica 0"].session is None, "the end of the session")
        stats = ring.stats().machine
        assert stats.drops_by_cause[DropCause.LATE] == len(slow.asked) == 1
        wait_until(lambda: ring.stats().machine.num_quarantined == 0, "the slot")


def fill_once_and_end_the_channel(link: Script, request: Request) -> None:
    """And say nothing yet."""
    if len(link.asked) == 1:
        link.fill(request)
        link.sender.close()


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_a_goodbye_that_is_heard_after_the_channel_ended_is_the_reason(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go two ways: a teacher's goodbye, sent ahead, may be heard behind the end of its channel."""
    monkeypatch.setattr("ring.session.LAST_WORD_S", HANG_GUARD_S)
    first, second = Script(fill_once_and_end_the_channel), Script(lambda link, request: link.fill(request))
    with ring_to(backend, [first, second]) as ring:
        for seq in range(2):
            ring.submit(seq, request_of(seq))
        replica = ring._pump.replicas["replica 0"]
        wait_until(lambda: replica.session is not None and replica.session.ending is not None, "the channel's end")
        assert ring.stats().machine.replicas[0].state == "down", "its requests are the others' at once"
        first.inbox.append(Goodbye(reason="closing"))
        take(ring, range(2))
        last_error = ring.stats().machine.replicas[0].last_error
        assert re.fullmatch(r"it said goodbye: closing \(the teacher closed .*\)", last_error)
        assert len(second.asked) == 1


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_what_was_asked_of_a_replica_whose_channel_ended_goes_to_another_at_once(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it still says why or not."""
    monkeypatch.setattr("ring.session.LAST_WORD_S", 10 * HANG_GUARD_S)

    def end(link: Script, request: Request) -> None:
        link.sender.close()

    ending, other = Script(end), Script(lambda link, request: link.fill(request))
    with ring_to(backend, [ending], [other]) as ring:
        all_up(ring)
        seq = 0
        while not ending.asked:  # whichever is asked first
            ring.submit(seq, request_of(seq))
            take(ring, range(seq, seq + 1))
            seq += 1
        assert is_down(ring)
        assert len(ending.asked) + len(other.asked) == seq + 1, "one was asked twice"


@pytest.mark.parametrize("backend", ["local", "shm"])
@pytest.mark.parametrize("link_breaks", [True, False])
def test_a_channel_that_ends_without_a_word_ends_the_session(
    backend: str, link_breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(link: Script, request: Request) -> None:
        fill_once_and_end_the_channel(link, request)
        link.breaks = link_breaks

    monkeypatch.setattr("ring.session.LAST_WORD_S", HANG_GUARD_S if link_breaks else 0.0)
    first, second = Script(end), Script(lambda link, request: link.fill(request))
    with ring_to(backend, [first, second]) as ring:
        for seq in range(2):
            ring.submit(seq, request_of(seq))
        take(ring, range(2))
        assert len(second.asked) == 1
        if not link_breaks:  # else either is a sign of the same
            assert "the teacher closed" in ring.stats().machine.replicas[0].last_error


def garble_the_first(link: Script, request: Request) -> None:
    if len(link.asked) == 2:
        link.fill(link.asked[0], header=b"\xc1 no header")
        link.fill(link.asked[1])


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_a_header_that_can_not_be_read_is_counted_and_what_follows_it_is_not_accepted(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs the replica its session, as any wrong answer does; and after that nothing of the session is accepted."""
    liar, honest = Script(garble_the_first), Script(lambda link, request: link.fill(request))
    with ring_to(backend, [liar, honest]) as ring:
        for seq in range(2):
            ring.submit(seq, request_of(seq))
        take(ring, range(2))
        stats = ring.stats().machine
        happened = {cause: count for cause, count in stats.drops_by_cause.items() if count}
        assert happened == {DropCause.WRONG_HEADER: 1, DropCause.LATE: 1}
        assert stats.fills == len(honest.asked) == 2
        assert stats.retries_by_cause[RetryCause.WRONG] == 1
        assert stats.replicas[0].num_joins == 2
        assert "malformed frame" in caplog.text
        assert caplog.text.count("dropped an answer (wrong_header, logged once)") == 1
