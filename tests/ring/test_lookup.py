"""Replicas given by name: a name server that is slow, ignorant or has news costs no replica but its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

import ring.control
from ring.core.errors import TeacherLost
from teacher.forward import TeacherModel
from tests.ring.rig import HANG_GUARD_S, Teacher, all_up, consume, make_ring, open_ring, wait_until

Answer = Callable[[], str]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What the name server answers; names that are not here it does not know. It is asked in no other thread than one
    that looks names up."""
    answers: dict[str, Answer] = {}
    ask = socket.getaddrinfo

    def asked(host: str, *arguments: Any, **options: Any) -> Any:
        if not host.endswith(".test"):
            return ask(host, *arguments, **options)
        assert threading.current_thread().name == "ring-lookup"
        if host not in answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(answers[host](), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    return answers


def named(host: str, teacher: Teacher) -> str:
    return f"tcp://{host}:{teacher.endpoint.rpartition(':')[2]}"


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_replica_given_by_name_serves(model: TeacherModel, names: dict[str, Answer], transport: str) -> None:
    names["teacher.test"] = lambda: "127.0.0.1"
    with Teacher(model) as asked, open_ring(model, named("teacher.test", asked), transport=transport) as ring:
        consume(ring, model, range(6))


def test_a_slow_name_server_holds_up_no_other_replica(model: TeacherModel, names: dict[str, Answer]) -> None:
    answer = threading.Event()

    def slowly() -> str:
        assert answer.wait(HANG_GUARD_S)
        return "127.0.0.1"

    names["slow.test"] = slowly
    with (
        Teacher(model) as fast,
        Teacher(model) as slow,
        open_ring(model, fast, named("slow.test", slow)) as ring,
    ):
        consume(ring, model, range(50))
        (waiting,) = [replica for replica in ring.stats().machine.replicas if replica.name != fast.endpoint]
        assert waiting.last_error == "the address of slow.test is still being looked up"
        answer.set()
        all_up(ring)
        fast.close()
        consume(ring, model, range(50, 60))


def test_a_name_that_nobody_knows_is_said(model: TeacherModel, names: dict[str, Answer]) -> None:
    said = "no address of nobody.test: Name or service not known"
    with make_ring(model, "tcp://nobody.test:5555") as ring:
        wait_until(lambda: said in ring._pump.last_errors(), "the lookup")
        with pytest.raises(TeacherLost, match=said):
            ring.wait_welcome(timeout_s=0)


def test_a_name_that_moves_while_nobody_answers_is_followed(
    model: TeacherModel, names: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring.control, "LOOK_AGAIN_S", 0.2)
    asked_of = []

    def moving() -> str:
        asked_of.append("127.0.0.3" if len(asked_of) < 2 else "127.0.0.2")
        return asked_of[-1]

    names["moving.test"] = moving
    with Teacher(model, listen="tcp://127.0.0.2:*") as asked, open_ring(model, named("moving.test", asked)) as rings:
        consume(rings, model, range(4))
        assert asked_of[:3] == ["127.0.0.3", "127.0.0.3", "127.0.0.2"]
        num_asked = len(asked_of)
        # Once it is there the name is left alone.
        consume(rings, model, range(4, 40))
        wait_until(lambda: rings.stats().machine.num_in_flight == 0, "nothing to be under way")
        assert len(asked_of) == num_asked
