"""A process killed at anything that it does to the disk, and the machine with it: a whole checkpoint is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.student.dying_writer import JOBS, LIMITS_BYTES

#: A tmpfs where there is one: some 250 deaths sync a few thousand files, which the disk itself need not be asked for.
MEMORY = Path("/dev/shm")
NEEDED_BYTES = 48 << 20
#: All deaths took 36 s on two cores with other work on them, and 112 s where twenty processes wanted those two.
HANG_GUARD_S = 1200.0
# Of the first test that asks for the deaths too.
pytestmark = pytest.mark.timeout(HANG_GUARD_S + 60)


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    in_memory = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > NEEDED_BYTES
    with tempfile.TemporaryDirectory(dir=MEMORY if in_memory else tmp_path_factory.mktemp("deaths")) as root:
        command = [sys.executable, "-m", "tests.student.dying_writer", root]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("job", JOBS)
def test_whenever_it_dies_the_old_one_or_the_new_one_is_there_and_no_torn_one(
    deaths: list[dict[str, Any]], job: str
) -> None:
    """next: a further checkpoint; same: one that replaces that of the same step; export: a model that replaces one."""
    own = [death for death in deaths if death["job"] == job]
    kills = [death for death in own if death["code"] == -9]
    # Twice the same events: with and without a power cut.
    assert len(kills) >= 2 * 25, "each file is opened, synced and named"
    assert len(own) - len(kills) == len(LIMITS_BYTES), "and each limit strikes in the midst of a file"
    for death in own:
        found = death["found"]
        assert found["seed"] in (1, 2), death
        assert found["skipped"] == [], death
        assert not [name for name in found["names"] if name.startswith(".")], death
    seeds = [death["found"]["seed"] for death in kills]
    for half in (seeds[: len(seeds) // 2], seeds[len(seeds) // 2 :]):
        assert half == sorted(half), "once the new one is there it stays"
        assert set(half) == {1, 2}, "both sides of the moment were seen"


def test_an_old_checkpoint_goes_only_when_the_new_one_is_there(deaths: list[dict[str, Any]]) -> None:
    for death in (death for death in deaths if death["job"] == "next"):
        names = death["found"]["names"]
        assert "step-00000020" in names
        assert "step-00000010" in names or "step-00000030" in names, death
