"""Nothing is left when a ring and its teacher are closed: no descriptor, thread, slot, socket file or port."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from teacher.forward import TeacherModel
from tests.leaks import expect_no_more, held
from tests.ring.rig import BACKENDS, HANG_GUARD_S, Teacher, consume, open_ring, request_of, wait_until


def use_and_close(model: TeacherModel, backend: str, ending: str) -> None:
    with Teacher(model, backend=backend) as asked, open_ring(model, asked, transport=backend) as ring:
        consume(ring, model, range(4))
        asked.hold_passes()
        for seq in range(4, 7):
            ring.submit(seq, request_of(seq))
        wait_until(lambda: asked.service.stats().queued == 3, "three requests")
        match ending:
            case "ring first":
                ring.close()
            case "teacher first":
                asked.close()
            case "a lease is held":
                asked.allow_passes()
                ring.next_lease(timeout_s=HANG_GUARD_S)
            case "frozen teacher":
                asked.freeze()
                ring.close()


@pytest.mark.parametrize("ending", ["ring first", "teacher first", "a lease is held", "frozen teacher"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_left_behind(
    model: TeacherModel, backend: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    use_and_close(model, backend, ending)  # what is made once for a process is made here
    before = held(tmp_path)
    for _ in range(2):
        use_and_close(model, backend, ending)
    expect_no_more(lambda: held(tmp_path), before)
