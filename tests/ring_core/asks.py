"""What the tests of the teacher's machine ask of it."""

from __future__ import annotations

from ring.core.messages import FillId, HeadRequest, RefusalCode, Request, TokenRequest
from ring.core.teacher import Batch, Refuse, TeacherConfig, TeacherMachine

ROW_BYTES = 8


def tokens(
    seq: int, *, slot: int = 0, num: int = 10, rows: int = 4, attempt: int = 0, time_left_s: float = 60.0
) -> Request:
    payload = TokenRequest(token_ids=bytes(4 * num), doc_lengths=(num,), row_ranges=((0, rows),), input_hash=b"h")
    return Request(fill=FillId(seq, attempt, slot), payload=payload, time_left_s=time_left_s)


def head(seq: int, *, slot: int = 0, num_bytes: int = 64) -> Request:
    payload = HeadRequest(vocab_start=0, vocab_end=8, offset=0, num_bytes=num_bytes)
    return Request(fill=FillId(seq, 0, slot), payload=payload, time_left_s=60.0)


def teacher(*students: str, num_slots: int = 4, **config: float) -> TeacherMachine:
    settings = {"max_batch_tokens": 100, "max_rows": 100, "max_tokens": 100, **config}
    machine = TeacherMachine(TeacherConfig(**settings))  # type: ignore[arg-type]
    for student in students:
        assert (
            machine.student_joined(student, num_slots=num_slots, slot_bytes=800, row_bytes=ROW_BYTES, now_s=0.0) == []
        )
    return machine


def seqs(batch: Batch) -> list[tuple[str, int]]:
    return [(work.student, work.request.fill.seq) for work in batch.work]


def refusals(actions: object) -> list[tuple[FillId, RefusalCode]]:
    assert isinstance(actions, list | tuple)
    return [(action.fill, action.code) for action in actions if isinstance(action, Refuse)]
