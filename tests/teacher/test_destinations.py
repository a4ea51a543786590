"""A student says where its slots are; the teacher does not go everywhere for that."""

from __future__ import annotations

import dataclasses

import pytest

from ring.core.errors import RemoteProtocolError
from ring.core.messages import Description, Offer, WireDtype
from teacher.destinations import Destinations

KEYS: Description = {"server_key": bytes(40), "secret": bytes(40)}
TOKEN: Description = {"token": b"t"}


def offer(backend: str, where: str, **more: str | int | bytes) -> Offer:
    place = {"zmq": "endpoint", "ucx": "host", "shm": "path"}[backend]
    return Offer(
        backend=backend,
        description={place: where, **more},
        num_slots=1,
        slot_bytes=4096,
        wire_dtype=WireDtype.BF16,
        crc=True,
    )


@pytest.mark.parametrize(
    ("backend", "where"),
    [("zmq", "tcp://10.1.2.3:5"), ("zmq", "tcp://[2001:db8::1]:5"), ("ucx", "10.1.2.3"), ("ucx", "2001:db8::1")],
)
def test_a_teacher_on_loopback_goes_nowhere_beyond_the_machine(backend: str, where: str) -> None:
    Destinations().check(offer(backend, where))
    with pytest.raises(RemoteProtocolError, match=r"listens on loopback only; allowed: a loopback address"):
        Destinations(within_machine=True).check(offer(backend, where, **KEYS))


@pytest.mark.parametrize(
    ("backend", "where"),
    [("zmq", "tcp://127.0.0.1:5"), ("zmq", "tcp://[::1]:5"), ("ucx", "127.0.0.1"), ("ucx", "::1"), ("shm", "/run/s")],
)
def test_within_the_machine_everything_is_as_the_student_says(backend: str, where: str) -> None:
    Destinations(within_machine=True, with_keys=True).check(offer(backend, where, **TOKEN))


def test_a_teacher_with_keys_sends_nothing_in_the_clear_that_can_be_encrypted() -> None:
    with pytest.raises(RemoteProtocolError, match=r"zmq at 10\.1\.2\.3 without keys; allowed: encrypted"):
        Destinations(with_keys=True).check(offer("zmq", "tcp://10.1.2.3:5", **TOKEN))
    Destinations(with_keys=True).check(offer("zmq", "tcp://10.1.2.3:5", **KEYS))
    Destinations().check(offer("zmq", "tcp://10.1.2.3:5", **TOKEN))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "10.1.2.3"])
def test_who_listens_beyond_the_machine_goes_beyond_it(host: str) -> None:
    within = host not in ("0.0.0.0", "10.1.2.3")
    assert Destinations.of(f"tcp://{host}:5", with_keys=within) == Destinations(within_machine=within, with_keys=within)


@pytest.mark.parametrize(("backend", "where"), [("zmq", "tcp://a.host:5"), ("zmq", "tcp://5"), ("ucx", "a.host")])
def test_no_name_is_looked_up_for_a_student(backend: str, where: str) -> None:
    with pytest.raises(RemoteProtocolError, match="allowed: an IP address"):
        Destinations().check(offer(backend, where, **TOKEN))


def test_what_makes_no_sense_is_left_to_the_backend_to_name() -> None:
    Destinations(within_machine=True).check(dataclasses.replace(offer("zmq", "x"), description={"endpoint": 7}))
    Destinations(within_machine=True).check(offer("zmq", "ipc:///run/x"))
