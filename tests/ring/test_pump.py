"""The pump's thread ends by itself: whoever waits for it is told, whatever is left to tell it with."""

from __future__ import annotations

import threading

import pytest

from ring.core.errors import LocalProtocolError
from ring.pump import Pump
from teacher.forward import TeacherModel
from tests.ring.rig import HANG_GUARD_S, Teacher, consume, open_ring, request_of


class Unheard(BaseException):
    """What nobody catches who catches an Exception."""


@pytest.mark.parametrize("kind", [MemoryError, Unheard])
def test_a_pump_that_can_not_say_why_it_ended_ends_the_run_all_the_same(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """As where no memory is left: reporting the failure fails, and giving everything back too."""
    shut_down = Pump._shut_down
    is_broken = threading.Event()

    def broken(pump: Pump, *_: object) -> bool:
        is_broken.set()
        raise kind("the first reason")

    def shut_down_badly(pump: Pump) -> None:
        shut_down(pump)
        raise kind("a later reason")

    with Teacher(model) as asked, open_ring(model, asked) as ring:
        consume(ring, model, range(2))
        monkeypatch.setattr(Pump, "_fail", broken)
        monkeypatch.setattr(Pump, "_shut_down", shut_down_badly)
        monkeypatch.setattr(Pump, "_turn", broken)
        assert is_broken.wait(HANG_GUARD_S)
        with pytest.raises(LocalProtocolError, match=rf"pump failed: {kind.__name__}: the first reason"):
            ring.next_lease(timeout_s=HANG_GUARD_S)
        assert ring.has_failed
        with pytest.raises(LocalProtocolError, match="the first reason"):
            ring.submit(2, request_of(2))
