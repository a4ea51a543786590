"""`student.train` whose --out is a disk of its own, which is full from a moment on.

`python -m tests.system.small_disk MOMENT COPY [FLAGS] --out DIR`: the disk is mounted at DIR, in a namespace of this
process. It fills up as soon as MOMENT has come: `start`, before anything is written; or a step, once its line is in
metrics.jsonl. At the end what is on it is copied to COPY, but for what filled it. Ends with 77 where it has no right to
mount.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from student.metrics import MetricsFile

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 1 << 18
#: A checkpoint is begun only where its bytes and 32 MiB more are free.
SIZE_MIB = 48
BALLAST = ".ballast"


def mount_small_disk(path: Path) -> None:
    """Raises OSError: no right to."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER))
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    check(libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, f"size={SIZE_MIB}m".encode()))


def fill(path: Path) -> None:
    with (path / BALLAST).open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass  # not a byte more


def fill_after(step: int, path: Path) -> None:
    write = MetricsFile.write

    def filling(file: MetricsFile, record: Any) -> None:
        write(file, record)
        if getattr(record, "step", None) == step:
            fill(path)

    MetricsFile.write = filling  # type: ignore[method-assign]


if __name__ == "__main__":
    from student.train.__main__ import main

    moment, copy, *flags = sys.argv[1:]
    out = Path(flags[flags.index("--out") + 1])
    out.mkdir()
    try:
        mount_small_disk(out)
    except OSError as error:
        print(error)
        sys.exit(77)
    if moment == "start":
        fill(out)
    else:
        fill_after(int(moment), out)
    code = main(flags)
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns(BALLAST))
    sys.exit(code)
