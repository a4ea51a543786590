"""Whether a fill is what was asked for (R3). Everything is compared; the first difference names the cause."""

from __future__ import annotations

from ring.core.config import Expectation
from ring.core.messages import FillHeader, FillId
from ring.core.stats import DropCause


def difference(
    header: FillHeader,
    *,
    fill: FillId,
    num_bytes: int,
    crc: int | None,
    expect: Expectation,
    student_epoch: str,
    teacher_epoch: str,
    fingerprint: str,
) -> tuple[DropCause, str] | None:
    """The first thing that is not as expected, with both values; None when the fill is right.

    num_bytes: what the transport delivered. crc: computed over the slot, None where checking is off.
    """
    checks: tuple[tuple[DropCause, str, object, object], ...] = (
        (DropCause.WRONG_FILL, "fill", header.fill, fill),
        (DropCause.WRONG_EPOCH, "student epoch", header.student_epoch, student_epoch),
        (DropCause.WRONG_EPOCH, "teacher epoch", header.teacher_epoch, teacher_epoch),
        (DropCause.WRONG_FINGERPRINT, "fingerprint", header.fingerprint, fingerprint),
        (DropCause.WRONG_HASH, "input hash", header.input_hash.hex(), expect.input_hash.hex()),
        (DropCause.WRONG_DTYPE, "dtype", header.dtype.value, expect.dtype.value),
        (DropCause.WRONG_ROWS, "row count", header.num_rows, expect.num_rows),
        (DropCause.WRONG_BYTES, "payload bytes", header.num_bytes, expect.num_bytes),
        (DropCause.WRONG_BYTES, "bytes delivered", num_bytes, expect.num_bytes),
    )
    for cause, what, found, expected in checks:
        if found != expected:
            return cause, f"{what} is {found}, expected was {expected}"
    if crc is not None and header.crc != crc:
        return DropCause.WRONG_CRC, f"crc32c of the payload is {crc}, its header says {header.crc}"
    return None
