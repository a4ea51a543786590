"""What a run says of its own memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from student.metrics import peak_rss_bytes

BALLAST_BYTES = 512 * 2**20


def test_peak_memory_is_of_this_process_and_not_of_the_one_that_started_it() -> None:
    ballast = np.ones(BALLAST_BYTES, dtype=np.uint8)
    assert peak_rss_bytes() > BALLAST_BYTES
    code = "from student.metrics import peak_rss_bytes; print(peak_rss_bytes())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert ballast.nbytes == BALLAST_BYTES  # still held while the other process ran
    assert 0 < int(said) < BALLAST_BYTES
