"""Nothing is left when a ring and its teacher are closed: no descriptor, thread, slot, socket file or port."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from pathlib import Path

import pytest

from teacher.forward import TeacherModel
from tests.ring.rig import BACKENDS, HANG_GUARD_S, Teacher, consume, open_ring, request_of, wait_until


def held(sockets: Path) -> dict[str, object]:
    """What this process holds that could be left behind. sockets: where it makes its socket files."""
    gc.collect()
    links = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
    return {
        "descriptors": sorted(os.readlink(link).split(":[")[0] for link in links if os.path.lexists(link)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "slots": sum("memfd:disaggkd" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "socket directories": sorted(path.name for path in sockets.iterdir()),
    }


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
    wait_until(lambda: held(tmp_path) == before, f"what was opened to be closed: {before}, now {held(tmp_path)}")
