"""Where a teacher may listen and a trainer connect: ports in use and used again, addresses that others reach."""

from __future__ import annotations

import socket

import pytest
import zmq

from ring.control import ZmqPort
from ring.core.errors import ConfigError
from ring.core.messages import Goodbye, Welcome
from ring.endpoints import check_exposure
from teacher.destinations import Destinations
from teacher.forward import TeacherModel
from tests.ring.rig import Teacher, consume, free_endpoint, make_hello, open_ring
from tests.ring.test_handshake import Stranger, an_offer


@pytest.mark.case(60)
def test_a_port_in_use_is_said_so(model: TeacherModel) -> None:
    context = zmq.Context()
    with Teacher(model) as first:
        message = rf"--listen {first.endpoint} can't be bound: .*; allowed: a free local port"
        with pytest.raises(ConfigError, match=message):
            ZmqPort(context, first.endpoint)
    context.term()


@pytest.mark.case(60)
def test_a_port_can_be_used_again_at_once(model: TeacherModel) -> None:
    """Case 60."""
    with Teacher(model, listen=free_endpoint()) as first, open_ring(model, first) as ring:
        consume(ring, model, range(2))
        for seq in range(2, 4):
            first.close()
            with Teacher(model, listen=first.endpoint):
                consume(ring, model, range(seq, seq + 1))


def test_a_teacher_follows_no_offer_to_where_it_must_not_go(model: TeacherModel) -> None:
    with Teacher(model, destinations=Destinations(within_machine=True)) as asked:
        stranger = Stranger(asked.endpoint)
        assert isinstance(stranger.ask(make_hello(model)), Welcome)
        description = {"endpoint": "tcp://192.0.2.1:5", "token": bytes(32)}
        answer = stranger.ask(an_offer(model, backend="zmq", description=description))
        assert isinstance(answer, Goodbye)
        assert "zmq at 192.0.2.1, while the teacher listens on loopback only" in answer.reason
        stranger.close()
        with open_ring(model, asked, transport="zmq") as ring:
            consume(ring, model, range(3))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")
@pytest.mark.parametrize("transport", ["zmq", "ucx"])
def test_states_travel_over_ipv6(model: TeacherModel, transport: str) -> None:
    with (
        Teacher(model, listen="tcp://[::1]:*") as asked,
        open_ring(model, asked, transport=transport) as ring,
    ):
        consume(ring, model, range(4))


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:5555", "tcp://10.1.2.3:5555", "tcp://[::]:5555", "tcp://a.host:5555"]
)
def test_an_address_that_others_reach_needs_the_users_word(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--listen .* leaves this machine.*allowed: a loopback address, --auth DIR .*or --insecure"
    ):
        check_exposure(endpoint, flag="--listen", auth=False, insecure=False)
    check_exposure(endpoint, flag="--listen", auth=False, insecure=True)
    check_exposure(endpoint, flag="--listen", auth=True, insecure=False)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5555", "tcp://127.9.9.9:1", "tcp://localhost:5555", "tcp://[::1]:5"]
)
def test_a_loopback_address_needs_no_word(endpoint: str) -> None:
    check_exposure(endpoint, flag="--teacher", auth=False, insecure=False)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:5555", "tcp://127.0.0.1", "tcp://:5555", "tcp://h:0", "tcp://h:70000", "ipc://x", ""]
)
def test_what_is_no_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not an endpoint; allowed: tcp://HOST:PORT, e\.g\. tcp://127\.0\.0\.1:5555"
    ):
        check_exposure(endpoint, flag="--teacher", auth=False, insecure=True)
